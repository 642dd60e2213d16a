"""The GPU kernels under Triton's interpreter, over odd shapes and dtypes, against float64 references.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run compiled on a card.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import decode_attention as decode_module
from flowinfer.kernels.activation import silu_mul, silu_mul_reference
from flowinfer.kernels.copy_blocks import copy_blocks, copy_blocks_reference
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention, decode_attention_reference
from flowinfer.kernels.draw import SlotSettings, advance_drawn, advance_drawn_reference, draw_scratch
from flowinfer.kernels.experts import bucket, experts, experts_reference, gather_gated, route, route_reference, weighted
from flowinfer.kernels.greedy import advance_greedy, advance_greedy_reference, greedy_scratch
from flowinfer.kernels.norm import rms_norm, rms_norm_reference
from flowinfer.kernels.prefill_attention import plan_tiles, prefill_attention, prefill_attention_reference
from flowinfer.kernels.rope import Heads, rope_write, rope_write_reference
from flowinfer.kernels.skinny_linear import skinny_linear, skinny_linear_reference

interpreter = pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
EPS = 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # each program costs a millisecond here
        monkeypatch.setattr(decode_module, "PROGRAMS", 40)


DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole; no NaN anywhere."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.isfinite().all()
    error = (got - want).norm() / want.norm().clamp(min=1e-9)
    assert error < (2e-5 if dtype is torch.float32 else 2.5e-2), float(error)


def wide(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor if tensor is None else tensor.double().cpu() for tensor in tensors]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 64, 48), (3, 576, 40), (17, 100, 33), (64, 128, 32)])
def test_skinny_linear(rows: int, size_in: int, size_out: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, size_in, dtype=dtype), random(size_out, size_in, dtype=dtype)
    norm, bias = random(size_in, dtype=dtype, seed=1), random(size_out, dtype=dtype, seed=2)
    near(skinny_linear(x, weight, bias_O=bias), skinny_linear_reference(*wide(x, weight), bias_O=wide(bias)[0]), dtype)
    residual = random(rows, size_out, dtype=dtype, seed=3)
    want = skinny_linear_reference(*wide(x, weight), norm_I=wide(norm)[0], eps=EPS, residual_MO=wide(residual)[0])
    got = skinny_linear(x, weight, norm_I=norm, eps=EPS, residual_MO=residual, out=residual)
    near(got, want, dtype)
    if size_out % 2 == 0:
        want = skinny_linear_reference(*wide(x, weight), norm_I=wide(norm)[0], eps=EPS, gated=True)
        near(skinny_linear(x, weight, norm_I=norm, eps=EPS, gated=True), want, dtype)


def test_skinny_linear_refuses_many_rows_and_other_dtypes() -> None:
    with pytest.raises(KernelUnsupported, match="64 rows"):
        skinny_linear(random(65, 16), random(16, 16))
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        skinny_linear(random(2, 16), random(16, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 576, 1000])
def test_norm_and_activation(width: int, dtype: torch.dtype) -> None:
    x, delta, weight = (
        random(5, width, dtype=dtype),
        random(5, width, dtype=dtype, seed=9),
        random(width, dtype=dtype),
    )
    want = rms_norm_reference(*wide(x, weight), EPS, delta=wide(delta)[0])
    got = rms_norm(x, weight, EPS, delta=delta)
    near(got[0], want[0], dtype)
    near(got[1], want[1], dtype)
    near(silu_mul(x), silu_mul_reference(*wide(x)), dtype)


SHAPES = [Heads(6, 2, 12), Heads(4, 4, 16), Heads(8, 1, 64), Heads(9, 3, 64)]


def cases(*quick: tuple[object, ...], every: list[tuple[object, ...]]) -> list[object]:
    """All cases; those that aren't quick run on demand, and on a card: in the interpreter each takes seconds."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in every]


PAGE = 16


def arena(heads: Heads, num_blocks: int, dtype: torch.dtype) -> Tensor:
    """Unwritten memory is NaN, as a hostile earlier tenant leaves it."""
    shape = (num_blocks, 3, 2, heads.num_kv_heads, PAGE, heads.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def written(
    heads: Heads, lengths: list[int], dtype: torch.dtype
) -> tuple[Tensor, np.ndarray[tuple[int, int], np.dtype[np.int32]]]:
    """An arena in which sequence s has lengths[s] tokens in blocks dealt out of order, and the block tables."""
    most = max(-(-max(n + 1, 1) // PAGE) for n in lengths)
    tables = np.random.default_rng(3).permutation(most * len(lengths) + 2)[: most * len(lengths)]
    tables = tables.reshape(len(lengths), most).astype(np.int32)
    kv = arena(heads, most * len(lengths) + 2, dtype)
    for s, length in enumerate(lengths):
        for t in range(length):
            page = kv[tables[s, t // PAGE], :, :, :, t % PAGE]
            page.copy_(random(*page.shape, dtype=dtype, seed=31 * s + t))
    return kv, tables


def ropes(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(300.0), 0.5 ** torch.arange(head_dim // 2))
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    return cos.to(DEVICE, dtype), sin.to(DEVICE, dtype)


def close_arenas(kv: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    written_ = ~other.isnan().cpu()
    assert torch.equal(~kv.isnan().cpu(), written_), "the same memory was written"
    near(kv.cpu()[written_], other.cpu()[written_], dtype)


@pytest.mark.parametrize(
    ("heads", "normed", "dtype"),
    cases(
        (SHAPES[0], False, torch.float32),
        (SHAPES[2], True, torch.bfloat16),
        every=list(itertools.product(SHAPES, (False, True), DTYPES)),
    ),
)
def test_decode_attention(heads: Heads, normed: bool, dtype: torch.dtype) -> None:
    n, k, d = heads
    lengths = [0, 1, 15, 16, 17, 70]
    kv, tables = written(heads, lengths, dtype)
    other = kv.double().cpu()
    qkv = random(len(lengths) + 1, (n + 2 * k) * d, dtype=dtype)
    slots = torch.tensor([3, 0, 5, -1, 1, 2, 4], dtype=torch.int32)
    after = torch.tensor([length + 1 for length in lengths], dtype=torch.int32)
    rope = ropes(dtype, d)
    norms = (random(d, dtype=dtype, seed=4), random(d, dtype=dtype, seed=5)) if normed else None
    sinks = random(n, dtype=torch.float32, seed=6) if normed else None
    for window in (0, 20):
        host = DecodeBatch(slots, after, torch.from_numpy(tables))
        batch = DecodeBatch(*(tensor.to(DEVICE) for tensor in host))
        want = decode_attention_reference(
            *wide(qkv), other, 1, heads, host, tuple(wide(*rope)), tuple(wide(*norms)) if norms else None, EPS,
            window=window, sinks_N=wide(sinks)[0],
        )  # fmt: skip
        scratch = Scratch.make(len(slots), heads, kv.device)
        for _ in range(2):  # the second finds the scratch as the first left it
            got = decode_attention(qkv, kv, 1, heads, batch, rope, norms, EPS, scratch, window=window, sinks_N=sinks)
        near(got, want, dtype)
        assert not got[3].any()
        close_arenas(kv, other, dtype)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    cases((SHAPES[0], torch.bfloat16), (SHAPES[1], torch.float32), every=list(itertools.product(SHAPES, DTYPES))),
)
def test_rope_then_prefill_attention(heads: Heads, dtype: torch.dtype) -> None:
    n, k, d = heads
    before, counts = [0, 5, 40, 16], [1, 60, 3, 17]
    kv, tables = written(heads, [b + c for b, c in zip(before, counts, strict=True)], dtype)
    for s, (b, c) in enumerate(zip(before, counts, strict=True)):
        for t in range(b, b + c):
            kv[tables[s, t // PAGE], :, :, :, t % PAGE] = float("nan")
    other = kv.double().cpu()
    positions = torch.cat([torch.arange(b, b + c) for b, c in zip(before, counts, strict=True)])
    sequence = np.repeat(np.arange(4), counts)
    blocks = torch.from_numpy(tables[sequence, positions.numpy() // PAGE])
    qkv, rope = random(sum(counts), (n + 2 * k) * d, dtype=dtype), ropes(dtype, d)
    norms = (random(d, dtype=dtype, seed=4), random(d, dtype=dtype, seed=5))
    want = rope_write_reference(
        *wide(qkv), other, 1, heads, positions, blocks, tuple(wide(*rope)), tuple(wide(*norms)), EPS
    )
    got = rope_write(qkv, kv, 1, heads, positions.to(DEVICE), blocks.to(DEVICE), rope, norms, EPS)
    near(got, want, dtype)
    close_arenas(kv, other, dtype)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.array(before, np.int32) + np.array(counts, np.int32)
    tiling = plan_tiles(starts, lens, tables, heads=heads, device=kv.device, dtype=dtype)
    sinks = random(n, seed=6)
    for window, sink in ((0, None), (9, None), (0, sinks), (30, sinks)):
        want_out = prefill_attention_reference(
            want, other, 1, heads, starts, lens, tables, window=window, sinks_N=wide(sink)[0]
        )
        near(prefill_attention(got, kv, 1, heads, tiling, window=window, sinks_N=sink), want_out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num", "top"),
    [
        (1, 6, 3),
        (5, 4, 2),
        pytest.param(33, 8, 8, marks=pytest.mark.slow),
        pytest.param(40, 5, 1, marks=pytest.mark.slow),
    ],
)
def test_experts(tokens: int, num: int, top: int, dtype: torch.dtype) -> None:
    hidden, width = 48, 24
    x, logits = random(tokens, hidden, dtype=dtype), random(tokens, num, dtype=dtype)
    gate_up, down = random(num, 2 * width, hidden, dtype=dtype), random(num, hidden, width, dtype=dtype)
    residual = random(tokens, hidden, dtype=dtype, seed=8)
    for norm_topk in (False, True):
        ids, weights = route(logits, top, norm_topk=norm_topk)
        want_ids, want_weights = route_reference(*wide(logits), top, norm_topk=norm_topk)
        assert torch.equal(ids.cpu(), want_ids)
        near(weights, want_weights, torch.float32)
    routing = bucket(ids, weights, num)
    for e in range(num):
        pairs = (want_ids.flatten() == e).nonzero().flatten().int()
        assert torch.equal(routing.pairs[e, : int(routing.counts[e])].cpu(), pairs)
    want = experts_reference(wide(x)[0], want_ids, want_weights, *wide(gate_up, down, residual))
    load = torch.full((num,), 3, dtype=torch.int32, device=x.device)
    near(experts(x, logits, gate_up, down, residual.clone(), top, norm_topk=True, load_E=load), want, dtype)
    assert torch.equal(load.cpu() - 3, want_ids.flatten().long().bincount(minlength=num).int())
    norm = random(hidden, dtype=dtype, seed=7)
    normed = rms_norm_reference(*wide(x, norm), EPS)[1]
    want = experts_reference(normed, want_ids, want_weights, *wide(gate_up, down, residual))
    h = gather_gated(x, gate_up, routing, norm_H=norm, eps=EPS)
    x, _ = rms_norm(residual.clone(), norm, EPS, delta=weighted(h, down, routing))
    near(x, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_moves_the_batch_on(dtype: torch.dtype) -> None:
    logits = random(6, 9001, dtype=dtype)
    logits[1, 77] = logits[1, 8000] = 50.0  # a tie across chunks
    logits[2, 5000] = float("nan")
    logits[3] = float("-inf")
    slots = torch.tensor([4, 0, 6, 2, -1, 1], dtype=torch.int32)
    state = [torch.full((7,), value, dtype=torch.int32) for value in (9, 5)]
    chosen = torch.zeros(6, dtype=torch.int32)
    mine = [tensor.clone().to(DEVICE) for tensor in (slots, *state, chosen)]
    advance_greedy_reference(logits.cpu(), slots, *state, chosen)
    scratch = greedy_scratch(6, 9001, logits.device)
    advance_greedy(logits, *mine, scratch)
    for got, want in zip(mine, (slots, *state, chosen), strict=True):
        assert torch.equal(got.cpu(), want)
    assert chosen.tolist()[1:4] == [77, -1, -1]
    assert not scratch[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_tokens_are_those_of_the_sampler(dtype: torch.dtype) -> None:
    filters = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.05),
        (20, 0.7, 0.01),
    ]
    rows = [(temperature, *row) for temperature in (0.0, 0.7, 1.5) for row in filters]
    count, vocab = len(rows), 5003
    logits = random(count, vocab, dtype=dtype) * 3
    logits[4, 9] = logits[9, 4000] = float("nan")
    logits[16] = 1.0  # all tie
    columns = (torch.tensor(column) for column in zip(*rows, strict=True))
    temperature, top_k, top_p, min_p = columns
    seeds = torch.arange(count) * 0x9E3779B97F4A7C1 - 5
    settings = SlotSettings(temperature, top_k.int(), top_p, min_p, seeds)
    slots = torch.randperm(count).int()
    slots[2] = -1
    state = [torch.zeros(count, dtype=torch.int32), torch.arange(count).int(), torch.zeros(count, dtype=torch.int32)]
    mine = [tensor.clone().to(DEVICE) for tensor in (slots, *state)]
    moved = SlotSettings(*(column.to(DEVICE) for column in settings))
    advance_drawn(logits, *mine, moved, draw_scratch(count, vocab, logits.device))
    advance_drawn_reference(logits.cpu(), slots, *state, settings)
    for got, want in zip(mine, (slots, *state), strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 2, 4), torch.float32), ((5, 8), torch.bfloat16), ((4100,), torch.float32)]
)
def test_blocks_are_copied_to_where_they_belong_and_nothing_else_changes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    target, source = random(6, *shape, dtype=dtype), random(9, *shape, dtype=dtype, seed=1)
    ids = torch.tensor([[4, 8], [0, 0], [5, 3]], dtype=torch.int32)
    expected = target.cpu().clone()
    copy_blocks_reference(expected, source.cpu(), ids)
    copy_blocks(target, source, ids.to(DEVICE), source[0].numel() * source.element_size())
    assert torch.equal(target.cpu(), expected)


def test_a_part_of_each_block_is_copied_where_blocks_lie_further_apart() -> None:
    target, source = random(6, 24), random(9, 40, seed=1)
    ids = torch.tensor([[4, 8], [0, 0], [5, 3]], dtype=torch.int32)
    expected = target.cpu().clone()
    copy_blocks_reference(expected[:, :12], source.cpu()[:, :12], ids)
    copy_blocks(target, source, ids.to(DEVICE), 48, steps=(96, 160))
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("wrong", ["bytes", "strides", "ids"])
def test_what_copy_blocks_cannot_copy_is_refused(wrong: str) -> None:
    target = random(4, 16)[:, ::2] if wrong == "strides" else random(4, 8)
    ids = torch.zeros(1, 2, dtype=torch.int64 if wrong == "ids" else torch.int32, device=DEVICE)
    with pytest.raises(KernelUnsupported, match="copy_blocks takes"):
        copy_blocks(target, random(4, 8), ids, 12 if wrong == "bytes" else 32)
