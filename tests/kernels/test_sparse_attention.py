"""Attention over a window and chosen entries: right against float64, and a token's bytes the same in any company.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from v4_cases import DEVICE, DTYPES, near, random, section, token_rows, wide

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import sparse_attention as module
from flowinfer.kernels.sparse_attention import Parts, num_splits, sparse_attention, sparse_attention_reference
from flowinfer.kernels.sparse_attention import triton as kernel
from flowinfer.kernels.token_rows import TokenRows, Turn

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_TILES", 2)
    monkeypatch.setattr(kernel, "SPLIT_TILES", 2)


def some_chosen(rows: TokenRows, rate: int, top: int) -> Tensor:
    """A random choice of what each token sees, ascending, with numbers that mustn't be used behind it."""
    made = torch.Generator().manual_seed(9)
    chosen = torch.full((len(rows.slots), top), 10**6, dtype=torch.int32)
    for t, position in enumerate(rows.positions.tolist()):
        count = (position + 1) // rate
        own = torch.randperm(count, generator=made)[:top].sort().values
        chosen[t, : len(own)] = own.int()
    return chosen.to(DEVICE)


def arena(rows: TokenRows, rate: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Window and entries of one arena."""
    page = rows.block_tokens
    numbers = random(int(rows.block_tables.max()) + 1, (page + page // rate) * size + 16, dtype=dtype)
    window = numbers[:, : page * size].view(-1, page, size)
    return window, numbers[:, page * size : -16].view(-1, page // rate, size)


def place_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twice: places of keys looked up in the loop, and before it."""
    for size in (1 << 20, 0):
        monkeypatch.setattr(kernel, "PLACED_FROM", size)
        yield


CASES = [  # heads, size, reach, rate, top
    (3, 16, 20, 4, 9),
    (8, 24, 32, 4, 200),
    (17, 32, 50, 8, 0),
    (4, 16, 7, 0, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "reach", "rate", "top"), CASES)
def test_attention_is_right(
    heads: int, size: int, reach: int, rate: int, top: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = token_rows([(0, 3), (250, 2), (31, 1)], page=32, padding=1)
    window, entries = arena(rows, rate or 4, size, dtype)
    q, sinks = random(len(rows.slots), heads, size, dtype=dtype, seed=2), random(heads, seed=3)
    angles = random(len(rows.slots), 4, seed=4)
    turn = Turn(angles.cos(), angles.sin())
    chosen = some_chosen(rows, rate, top) if top else None
    options: dict[str, Any] = {"reach": reach, "rate": rate}
    got, placed = (
        sparse_attention(
            q, window, entries if rate else None, rows, sinks_N=sinks, chosen_TK=chosen, turn=turn, **options
        )
        for _ in place_keys(monkeypatch)
    )
    assert torch.equal(placed, got), "places that are looked up before are the same"
    want = sparse_attention_reference(
        q.double().cpu(), window.double().cpu(), entries.double().cpu() if rate else None, wide(rows),
        sinks_N=sinks.double().cpu(), chosen_TK=None if chosen is None else chosen.cpu(),
        turn=Turn(turn.cos.cpu(), turn.sin.cpu()), **options,
    )  # fmt: skip
    near(got, want, dtype)
    assert not got[-1].any(), "padding gives zeros"


def test_without_sinks_and_behind_the_start_of_a_replay() -> None:
    rows = token_rows([(40, 3)], page=32, window_from=37)
    window, entries = arena(rows, 4, 16, torch.float32)
    q = random(3, 2, 16)
    want = sparse_attention_reference(
        q.double().cpu(), window.double().cpu(), entries.double().cpu(), wide(rows), reach=64, rate=4
    )
    near(sparse_attention(q, window, entries, rows, reach=64, rate=4), want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bytes_with_splits_side_by_side_and_among_others(dtype: torch.dtype) -> None:
    rows = token_rows([(410, 3), (5, 1), (300, 1)], page=32)
    window, entries = arena(rows, 2, 16, dtype)
    q, sinks = random(5, 3, 16, dtype=dtype), random(3)
    angles = random(5, 2)
    parts = Parts.make(5, 3, 16, num_splits(40, rows.most_tokens // 2, 32), torch.device(DEVICE))

    def run(part: slice, parts: Parts | None) -> Tensor:
        turn = Turn(angles[part].cos(), angles[part].sin())
        return sparse_attention(
            q[part], window, entries, rows.part(part), reach=40, rate=2, sinks_N=sinks, turn=turn, parts=parts,
            fixed=True,
        )  # fmt: skip

    whole = run(slice(0, 5), None)
    assert torch.equal(run(slice(0, 5), parts), whole)
    for t in range(5):
        assert torch.equal(run(slice(t, t + 1), parts), whole[t : t + 1])


def test_what_nobody_wrote_is_not_read() -> None:
    rows = token_rows([(40, 1)], page=32)
    window, entries = arena(rows, 4, 16, torch.float32)
    table = rows.block_tables[0].long()
    window[table[41 // 32], 41 % 32 :] = float("nan")
    entries[table[1], 41 // 4 - 8 :] = float("nan")
    assert sparse_attention(random(1, 2, 16), window, entries, rows, reach=64, rate=4).isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    rows = token_rows([(20, 1)], page=16)
    window, entries = arena(rows, 4, 16, torch.float32)
    q = random(1, 2, 16)
    with pytest.raises(KernelUnsupported, match="one dtype"):
        sparse_attention(q.bfloat16(), window, entries, rows, reach=8, rate=4)
    with pytest.raises(KernelUnsupported, match="8 tokens an entry"):
        sparse_attention(q, window, entries, rows, reach=8, rate=8)
    with pytest.raises(KernelUnsupported, match="one arena"):
        sparse_attention(q, window, section(rows, 4, 16, torch.float32).clone(), rows, reach=8, rate=4)
