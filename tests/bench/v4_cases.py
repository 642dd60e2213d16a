"""Steps over a paged arena for tests of DeepSeek-V4's kernels: tokens of several sequences, tables out of order."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowinfer.kernels.token_rows import TokenRows

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=made).to(dtype).to(DEVICE)


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole; no NaN anywhere."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.isfinite().all()
    error = (got - want).norm() / want.norm().clamp(min=1e-9)
    assert error < (2e-5 if dtype is torch.float32 else 1e-2), float(error)


def token_rows(
    steps: Sequence[tuple[int, int]], *, page: int, most: int = 0, padding: int = 0, window_from: int = 0
) -> TokenRows:
    """Rows of sequences (tokens before this step, tokens in it); `padding` rows belong to nobody. most: of a table."""
    most = most or max(-(-(start + count) // page) for start, count in steps)
    tables = np.random.default_rng(3).permutation(len(steps) * most + 1)[: len(steps) * most].reshape(len(steps), most)
    columns = [
        (slot, start + i, start, start + count, window_from, 0)
        for slot, (start, count) in enumerate(steps)
        for i in range(count)
    ]
    columns += [(-1, 0, 0, 1, 0, 0)] * padding
    values = torch.tensor(columns, dtype=torch.int32).t().contiguous().to(DEVICE)
    single = all(count == 1 for _, count in steps)
    return TokenRows(*values.unbind(), torch.from_numpy(tables.astype(np.int32)).to(DEVICE), page, single)


def section(rows: TokenRows, count: int, width: int, dtype: torch.dtype, *, seed: int = 0, integers: int = 0) -> Tensor:
    """A section [blocks, count, width] of an arena, a view as a model's are. integers: whole numbers up to it."""
    blocks = int(rows.block_tables.max()) + 1
    if integers:
        made = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-integers, integers + 1, (blocks, count * width + 32), generator=made).to(dtype)
    else:
        numbers = random(blocks, count * width + 32, dtype=dtype, seed=seed)
    return numbers.to(DEVICE)[:, 16 : 16 + count * width].view(blocks, count, width)


def wide(rows: TokenRows) -> TokenRows:
    """On the CPU, for references."""
    return TokenRows(*(part.cpu() if isinstance(part, Tensor) else part for part in rows))
