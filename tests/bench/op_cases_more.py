"""Cases of bench_ops for steps with drafts and for weights in FP8; see op_cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from op_cases import BF16, PAGE, Call, Case, Shape, case

from flowinfer.kernels import grouped_experts
from flowinfer.kernels.decode_attention import DecodeBatch
from flowinfer.kernels.draw import SlotSettings
from flowinfer.kernels.experts import route
from flowinfer.kernels.fp8_experts import fp8_experts
from flowinfer.kernels.fp8_linear import Fp8Weight, fp8_linear
from flowinfer.kernels.ngram import look_up, lookup_scratch
from flowinfer.kernels.rejection import reject
from flowinfer.kernels.verify import Drafted, Rows, advance_verified, spread_rows, verdict_width
from flowinfer.kernels.verify_attention import make_scratch, verify_attention

DRAFTS = 4


@case
def verify_attention_(s: Shape) -> Iterator[Case]:
    n, k, d = s.heads
    each = 1 + DRAFTS
    size = s.batch * s.context * 2 * k * d * 2
    tables, layers = s.blocks(s.batch, s.context + each), s.copies(size)
    kv = s.random(tables.numel(), layers, 2, k, PAGE, d)
    batch = DecodeBatch(s.ints(range(s.batch)), s.ints([s.context] * s.batch), tables)
    counts, qkv = s.ints([each] * s.batch), s.random(s.batch * each, (n + 2 * k) * d)
    rope, norms = s.rope(s.context + each), (s.random(d), s.random(d))
    scratch = make_scratch(s.batch, each, s.heads, torch.device(s.device))
    calls: list[Call] = [
        lambda i=i: verify_attention(qkv, kv, i, s.heads, batch, counts, rope, norms, 1e-6, scratch)  # type: ignore[misc]
        for i in range(layers)
    ]
    yield Case(f"{s.batch} x {each} rows of {s.context}", calls, size, 4 * n * d * s.batch * each * s.context)


@case
def verify(s: Shape) -> Iterator[Case]:
    device = torch.device(s.device)
    each = 1 + DRAFTS
    drafted, rows = Drafted.make(s.batch, DRAFTS, device), Rows.make(s.batch, each, device)
    slots, last = s.ints(range(s.batch)), s.ints([5] * s.batch)
    lengths, settings = s.ints([20] * s.batch), SlotSettings.make(s.batch, device)
    chosen = torch.ones(s.batch * each, dtype=torch.int32, device=device)
    out = torch.empty(s.batch, verdict_width(each, DRAFTS), dtype=torch.int32, device=device)

    def step() -> None:
        spread_rows(slots, last, lengths, drafted, settings, rows)
        advance_verified(chosen, slots, rows, drafted, last, lengths, out)

    yield Case(f"{s.batch} x {each} rows, spread and advanced", [step], 4 * (16 * s.batch * each + out.numel()))


@case
def ngram(s: Shape) -> Iterator[Case]:
    positions = 2 * s.prompt
    device = torch.device(s.device)
    slots, lengths = s.ints(range(s.batch)), s.ints([positions - 8] * s.batch)
    drafts, num = torch.zeros(s.batch, DRAFTS, dtype=torch.int32, device=device), s.ints([0] * s.batch)
    scratch, size = lookup_scratch(s.batch, device), 4 * s.batch * positions
    histories = [
        torch.randint(0, s.vocab, (s.batch, positions), dtype=torch.int32, device=device) for _ in range(s.copies(size))
    ]
    calls: list[Call] = [
        lambda h=h: look_up(slots, h, lengths, drafts, num, scratch, ngram_min=2, ngram_max=4)  # type: ignore[misc]
        for h in histories
    ]
    yield Case(f"{s.batch} histories of {positions}", calls, size)


@case
def rejection(s: Shape) -> Iterator[Case]:
    def rows(count: int) -> torch.Tensor:
        return torch.randn(s.batch, count, s.vocab, device=s.device).softmax(-1)

    p, q = rows(1 + DRAFTS), rows(DRAFTS)
    drafts = torch.randint(0, s.vocab, (s.batch, DRAFTS), device=s.device)
    uniforms = torch.rand(s.batch, 1 + DRAFTS, device=s.device)
    call: Call = lambda: reject(p, q, drafts, uniforms)  # noqa: E731
    yield Case(f"{s.batch} x {DRAFTS} drafts of {s.vocab}", [call], 2 * 4 * s.batch * s.vocab)


def _fp8(s: Shape, *shape: int) -> Fp8Weight:
    """Codes of small numbers, all scales alike."""
    codes = torch.randint(0, 60, shape, dtype=torch.uint8, device=s.device).view(torch.float8_e4m3fn)
    groups = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return Fp8Weight(codes, torch.full(groups, 1e-3, device=s.device))


@case
def fp8_linear_(s: Shape) -> Iterator[Case]:
    high, wide = 2 * s.ffn, s.hidden
    for rows in (1, s.batch, s.prompt):
        weights = [_fp8(s, high, wide) for _ in range(s.copies(high * wide))]
        x = s.random(rows, wide)
        calls: list[Call] = [lambda w=w, x=x: fp8_linear(x, w) for w in weights]  # type: ignore[misc]
        yield Case(f"{rows} rows, gate, up", calls, high * wide + 2 * rows * (high + wide), 2 * rows * high * wide)


@case
def fp8_experts_(s: Shape) -> Iterator[Case]:
    num, top, width, hidden = s.experts
    gate_up, down = _fp8(s, num, 2 * width, hidden), _fp8(s, num, hidden, width)
    for rows in (s.batch, s.prompt):
        x, logits, residual = s.random(rows, hidden), s.random(rows, num), s.random(rows, hidden)
        touched = len(route(logits, top, norm_topk=True)[0].unique())
        call = lambda a=(x, logits, gate_up, down, residual, top): fp8_experts(*a, norm_topk=True)  # noqa: E731
        moved = touched * 3 * width * hidden + rows * hidden * 6
        yield Case(f"{rows} rows, {touched} of {num}", [call], moved, 6 * rows * top * width * hidden)


@case
def grouped_experts_(s: Shape) -> Iterator[Case]:
    num, top, width, hidden = s.experts
    gate_up, down = s.random(num, 2 * width, hidden) * 0.02, s.random(num, hidden, width) * 0.02
    x, ids = s.random(s.prompt, hidden), route(s.random(s.prompt, num), top, norm_topk=True)[0]
    blocks = grouped_experts.lay_out(ids, num)
    assert x.dtype is BF16

    def layer() -> None:
        grouped_experts.down_rows(grouped_experts.gated_rows(x, gate_up, blocks), down, blocks)

    moved = num * 3 * width * hidden * 2 + s.prompt * hidden * 2 * (1 + top)
    yield Case(f"{s.prompt} rows, both products", [layer], moved, 6 * s.prompt * top * width * hidden)
