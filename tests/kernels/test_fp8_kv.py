"""Attention over keys and values in E4M3: what it reads from them is what it reads from the same numbers in bfloat16.

Under Triton's interpreter; with FLOWINFER_TEST_DEVICE=cuda:0 compiled on a card.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import decode_attention as decode_module
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention
from flowinfer.kernels.prefill_attention import plan_tiles, prefill_attention
from flowinfer.kernels.rope import Heads, rope_write, to_kv
from flowinfer.kernels.verify_attention import make_scratch, verify_attention

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("FLOWINFER_TEST_DEVICE", "cpu"))
HEADS = [Heads(6, 2, 12), Heads(4, 1, 64)]
BF16, E4M3, PAGE = torch.bfloat16, torch.float8_e4m3fn, 16
LENGTHS = [0, 1, 17, 40]  # tokens that lie in the arena


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode_module, "PROGRAMS", 16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16).to(DEVICE)


def arenas(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers in E4M3 and in bfloat16, NaN where nothing was written, and block tables."""
    tables = np.random.default_rng(3).permutation(len(LENGTHS) * 4).reshape(len(LENGTHS), 4).astype(np.int32)
    plain = torch.full((len(LENGTHS) * 4, 2, 2, heads.num_kv_heads, PAGE, heads.head_dim), float("nan"), dtype=BF16)
    for s, length in enumerate(LENGTHS):
        for t in range(length):
            page = plain[tables[s, t // PAGE], :, :, :, t % PAGE]
            page.copy_(random(*page.shape, seed=31 * s + t) * 3)
    codes = plain.to(E4M3).to(DEVICE)
    return codes, codes.to(BF16), torch.from_numpy(tables).to(DEVICE)


def rope(head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(head_dim // 2))
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    return cos.to(DEVICE, BF16), sin.to(DEVICE, BF16)


def same(codes: Tensor, plain: Tensor) -> None:
    """The arena in E4M3 holds what the other one holds, rounded; both are written at the same places."""
    there = ~plain.isnan()
    assert torch.equal(there, ~codes.float().isnan())
    assert torch.equal(codes.float()[there], to_kv(plain, codes).float()[there])


def rows(count: int, heads: Heads) -> Tensor:
    n, k, d = heads
    made = random(count, (n + 2 * k) * d, seed=7)
    made[-1, -1] = 3000.0  # a value beyond E4M3
    return made


@pytest.mark.parametrize("heads", HEADS)
def test_decode(heads: Heads) -> None:
    codes, plain, tables = arenas(heads)
    ints = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([2, 0, 3, -1, 1], [1, 2, 18, 41])]
    batch, qkv = DecodeBatch(*ints, tables), rows(5, heads)
    scratch = Scratch.make(5, heads, DEVICE)
    args = batch, rope(heads.head_dim), None, 1e-5, scratch
    outs = [decode_attention(qkv, kv, 1, heads, *args) for kv in (codes, plain)]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
    same(codes, plain)
    again = decode_attention(qkv, codes, 1, heads, *args)
    torch.testing.assert_close(again, outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_verify(heads: Heads) -> None:
    codes, plain, tables = arenas(heads)
    ints = [torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in ([2, 0, 3, 1], [1, 2, 18, 41], [1, 3, 0, 2])]
    slots, lengths, counts = ints
    args = DecodeBatch(slots, lengths, tables), counts, rope(heads.head_dim), None, 1e-5
    qkv = rows(12, heads)
    outs = [
        verify_attention(qkv, kv, 1, heads, *args, make_scratch(4, 3, heads, DEVICE)).view(4, 3, -1)
        for kv in (codes, plain)
    ]
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(outs[0][row, :count], outs[1][row, :count], atol=1e-5, rtol=1e-5)
    same(codes, plain)


@pytest.mark.parametrize("heads", HEADS)
def test_rope_and_prefill(heads: Heads) -> None:
    codes, plain, tables = arenas(heads)
    counts = np.array([3, 20, 1, 5])
    positions = np.concatenate([np.arange(b, b + c) for b, c in zip(LENGTHS, counts, strict=True)])
    sequence = torch.from_numpy(np.repeat(np.arange(4), counts)).to(DEVICE)
    at = torch.from_numpy(positions).to(DEVICE)
    blocks, qkv = tables[sequence, at // PAGE], rows(int(counts.sum()), heads)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lens = (np.array(LENGTHS) + counts).astype(np.int32)
    qk = rope_write(qkv, plain, 1, heads, at, blocks, rope(heads.head_dim), None, 1e-5)
    assert torch.equal(rope_write(qkv, codes, 1, heads, at, blocks, rope(heads.head_dim), None, 1e-5), qk)
    same(codes, plain)
    host = tables.cpu().numpy()
    tiling = plan_tiles(starts, lens, host, heads=heads, device=DEVICE, dtype=BF16)
    outs = [prefill_attention(qk, kv, 1, heads, tiling) for kv in (codes, codes.to(BF16))]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_rows_of_another_dtype_are_refused() -> None:
    heads = HEADS[0]
    codes, _, tables = arenas(heads)
    batch = DecodeBatch(tables[:, 0], tables[:, 0], tables)
    with pytest.raises(KernelUnsupported, match="one dtype"):
        decode_attention(
            rows(4, heads).float(), codes, 1, heads, batch, rope(12), None, 1e-5, Scratch.make(4, heads, DEVICE)
        )
