"""What each op of flowinfer/kernels is timed on: calls over enough memory, the bytes they must move, their arithmetic.

An entry of CASES by op. Bytes are what must be read and written at least once; what an op reads again costs it its
share of the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowinfer.kernels.activation import silu_mul
from flowinfer.kernels.copy_blocks import copy_blocks
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention
from flowinfer.kernels.dequantize import dequantize
from flowinfer.kernels.draw import SlotSettings, advance_drawn, draw_scratch
from flowinfer.kernels.experts import experts, route
from flowinfer.kernels.greedy import advance_greedy, greedy_scratch
from flowinfer.kernels.invariant_attention import TILE_ROWS, Parts, invariant_attention
from flowinfer.kernels.invariant_linear import invariant_linear
from flowinfer.kernels.norm import rms_norm
from flowinfer.kernels.paged_attention import paged_attention, plan_attention
from flowinfer.kernels.prefill_attention import Tiling, plan_tiles, prefill_attention
from flowinfer.kernels.rope import Heads, rope_write
from flowinfer.kernels.sampling import RowParams, sample, stream_keys
from flowinfer.kernels.skinny_linear import skinny_linear

Call = Callable[[], object]
BF16 = torch.bfloat16
PAGE = 64


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of a step. cold: bytes over which calls go in turn, so that no cache holds them."""

    heads: Heads = field(default_factory=lambda: Heads(32, 8, 128))
    hidden: int = 4096
    ffn: int = 12_288
    experts: tuple[int, int, int, int] = (128, 8, 768, 2048)  # of a layer, chosen, width, hidden
    vocab: int = 151_936
    batch: int = 64
    context: int = 1024
    prompt: int = 8192
    cold: int = 200_000_000
    device: str = "cuda"

    def random(self, *shape: int) -> Tensor:
        """bfloat16."""
        return torch.randn(shape, dtype=BF16, device=self.device)

    def ints(self, values: Any) -> Tensor:
        """int32."""
        return torch.as_tensor(np.asarray(values, np.int32), device=self.device)

    def copies(self, size: int, most: int = 48) -> int:
        """How often memory of so many bytes must be there."""
        return max(1, min(most, math.ceil(self.cold / size)))

    def blocks(self, sequences: int, tokens: int) -> Tensor:
        """Block tables, dealt out of order."""
        each = -(-tokens // PAGE)
        return torch.randperm(sequences * each, device=self.device).int().view(sequences, each)

    def rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables of cosines and sines."""
        return self.random(positions, self.heads.head_dim), self.random(positions, self.heads.head_dim)


SMALL = Shape(
    Heads(4, 2, 16), hidden=32, ffn=48, experts=(4, 2, 32, 32), vocab=5000, batch=2, context=20, prompt=70, cold=1,
    device="cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """calls: each over memory of its own. in_graph: whether they can be captured; else each waits for the host."""

    name: str
    calls: list[Call]
    bytes: float
    flops: float = 0.0
    in_graph: bool = True


CASES: dict[str, Callable[[Shape], Iterator[Case]]] = {}


def case(make: Callable[[Shape], Iterator[Case]]) -> Callable[[Shape], Iterator[Case]]:
    """Enters a generator of cases under its op's name."""
    CASES[make.__name__.removesuffix("_")] = make  # named so beside the op that it calls
    return make


def _over(tensors: list[Tensor], call: Callable[[Tensor], object]) -> list[Call]:
    return [lambda tensor=tensor: call(tensor) for tensor in tensors]


@case
def activation(s: Shape) -> Iterator[Case]:
    for rows in (s.batch, s.prompt):
        size = rows * s.ffn * 2
        xs = [s.random(rows, 2 * s.ffn) for _ in range(s.copies(3 * size))]
        yield Case(f"{rows} x {s.ffn}", _over(xs, silu_mul), 3 * size)


@case
def norm(s: Shape) -> Iterator[Case]:
    weight = s.random(s.hidden)
    for rows in (s.batch, s.prompt):
        size = rows * s.hidden * 2
        xs = [s.random(2, rows, s.hidden) for _ in range(s.copies(4 * size))]
        yield Case(
            f"{rows} x {s.hidden}, sum before", _over(xs, lambda x: rms_norm(x[0], weight, 1e-6, delta=x[1])), 4 * size
        )


@case
def rope(s: Shape) -> Iterator[Case]:
    n, k, d = s.heads
    tokens = s.prompt
    kv = s.random(-(-tokens // PAGE), 1, 2, k, PAGE, d)
    positions = torch.arange(tokens, device=s.device)
    blocks = s.blocks(1, tokens)[0][positions // PAGE].contiguous()
    tables, norms = s.rope(tokens), (s.random(d), s.random(d))
    size = tokens * d * 2
    xs = [s.random(tokens, (n + 2 * k) * d) for _ in range(s.copies(size * (n + 2 * k)))]
    calls = _over(xs, lambda x: rope_write(x, kv, 0, s.heads, positions, blocks, tables, norms, 1e-6))
    yield Case(f"{tokens} tokens, normed and written", calls, size * (n + 2 * k + n + k + 2 * k + 2))


@case
def decode_attention_(s: Shape) -> Iterator[Case]:
    n, k, d = s.heads
    for rows, context in ((1, s.context), (s.batch, s.context), (2 * s.batch, s.context), (1, 2 * s.prompt)):
        size = rows * context * 2 * k * d * 2
        tables, layers = s.blocks(rows, context), s.copies(size)
        kv = s.random(tables.numel(), layers, 2, k, PAGE, d)
        batch = DecodeBatch(s.ints(range(rows)), s.ints([context] * rows), tables)
        qkv, rope, norms = s.random(rows, (n + 2 * k) * d), s.rope(context), (s.random(d), s.random(d))
        scratch = Scratch.make(rows, s.heads, torch.device(s.device))
        calls = [
            lambda i=i, a=(qkv, kv), b=(s.heads, batch, rope, norms, 1e-6, scratch): decode_attention(*a, i, *b)
            for i in range(layers)
        ]
        yield Case(f"{rows} rows of {context}", calls, size, 4 * n * d * rows * context)


@case
def prefill_attention_(s: Shape) -> Iterator[Case]:
    kv, q, tiling = _whole_prompt(s, 0)
    yield _causal(s, [lambda: prefill_attention(q, kv, 0, s.heads, tiling)])


@case
def paged_attention_(s: Shape) -> Iterator[Case]:
    n, k, d = s.heads
    rows, size = s.batch, s.batch * s.context * 2 * k * d * 2
    tables = s.blocks(rows, s.context)
    kv = s.random(tables.numel(), 1, 2, PAGE, k, d)
    starts, lens = np.arange(rows + 1, dtype=np.int32), np.full(rows, s.context, np.int32)
    plan = plan_attention(starts, lens, tables.cpu().numpy(), kv=kv, num_heads=n, num_kv_heads=k)
    q, key, value = s.random(rows, n, d), s.random(rows, k, d), s.random(rows, k, d)
    call = lambda: paged_attention(q, key, value, kv, 0, plan)  # noqa: E731
    yield Case(f"{rows} rows of {s.context}", [call], size, 4 * n * d * rows * s.context)


@case
def skinny_linear_(s: Shape) -> Iterator[Case]:
    n, _, d = s.heads
    for rows in (1, 16, min(64, s.batch)):
        for name, wide, high, gated in (("out", n * d, s.hidden, False), ("gate, up", s.hidden, 2 * s.ffn, True)):
            weights = [s.random(high, wide) for _ in range(s.copies(2 * high * wide))]
            x = s.random(rows, wide)
            calls = _over(weights, lambda w, x=x, gated=gated: skinny_linear(x, w, gated=gated))  # type: ignore[misc]
            yield Case(f"{rows} rows, {name}", calls, 2 * high * wide, 2 * rows * high * wide)


@case
def invariant_linear_(s: Shape) -> Iterator[Case]:
    for rows, wide in ((s.batch, False), (s.prompt, True)):
        weights = [s.random(2 * s.ffn, s.hidden) for _ in range(s.copies(4 * s.ffn * s.hidden, 4))]
        x = s.random(rows, s.hidden)
        moved = 4 * s.ffn * s.hidden + 2 * rows * (s.hidden + s.ffn)
        calls = _over(weights, lambda w, x=x, wide=wide: invariant_linear(x, w, gated=True, wide=wide))  # type: ignore[misc]
        yield Case(f"{rows} rows, gate, up", calls, moved, 4 * rows * s.ffn * s.hidden)


@case
def invariant_attention_(s: Shape) -> Iterator[Case]:
    n, k, d = s.heads
    rows, size = s.batch, s.batch * s.context * 2 * k * d * 2
    tables, layers = s.blocks(rows, s.context), s.copies(size)
    kv, q = s.random(tables.numel(), layers, 2, k, PAGE, d), s.random(rows, n, d)
    tiles = torch.stack((s.ints(range(rows)), s.ints([0] * rows)), 1)
    tiling = Tiling(tiles, s.ints(range(rows + 1)), s.ints([s.context] * rows), tables, tokens=TILE_ROWS // (n // k))
    parts = Parts.make(rows, tables.shape[1], s.heads, torch.device(s.device))
    calls = [
        lambda i=i: invariant_attention(q, kv, i, s.heads, tiling, parts=parts)  # type: ignore[misc]
        for i in range(layers)
    ]
    yield Case(f"{rows} rows of {s.context}", calls, size, 4 * n * d * rows * s.context)
    kv_, q_, tiling_ = _whole_prompt(s, TILE_ROWS)
    yield _causal(s, [lambda: invariant_attention(q_, kv_, 0, s.heads, tiling_)])


def _whole_prompt(s: Shape, rows: int) -> tuple[Tensor, Tensor, Tiling]:
    n, k, d = s.heads
    tables = s.blocks(1, s.prompt)
    starts, lens = np.array([0, s.prompt], np.int32), np.array([s.prompt], np.int32)
    device = torch.device(s.device)
    tiling = plan_tiles(starts, lens, tables.cpu().numpy(), heads=s.heads, device=device, dtype=BF16, rows=rows)
    return s.random(tables.numel(), 1, 2, k, PAGE, d), s.random(s.prompt, n + k, d), tiling


def _causal(s: Shape, calls: list[Call]) -> Case:
    n, k, d = s.heads
    flops = 4 * n * d * s.prompt * (s.prompt + 1) / 2
    return Case(f"a prompt of {s.prompt}", calls, 2 * s.prompt * d * (2 * n + 2 * k), flops)


@case
def experts_(s: Shape) -> Iterator[Case]:
    num, top, width, hidden = s.experts
    layers = s.copies(num * 3 * width * hidden * 2, 3)
    gate_up = [s.random(num, 2 * width, hidden) * 0.02 for _ in range(layers)]
    down = [s.random(num, hidden, width) * 0.02 for _ in range(layers)]
    for rows in (1, s.batch, 8 * s.batch, s.prompt):
        x, logits, residual = s.random(rows, hidden), s.random(rows, num), s.random(rows, hidden)
        touched = len(route(logits, top, norm_topk=True)[0].unique())
        moved = touched * 3 * width * hidden * 2 + rows * hidden * 6
        calls: list[Call] = [
            lambda i=i, a=(x, logits), r=residual: experts(*a, gate_up[i], down[i], r, top, norm_topk=True)
            for i in range(layers)
        ]
        yield Case(f"{rows} rows, {touched} of {num}", calls, moved, 6 * rows * top * width * hidden)


@case
def greedy(s: Shape) -> Iterator[Case]:
    for rows in (1, s.batch):
        state = [s.ints(range(rows)), *(s.ints([1] * rows) for _ in range(3))]
        scratch = greedy_scratch(rows, s.vocab, torch.device(s.device))
        call = lambda x, a=(state, scratch): advance_greedy(x, *a[0], a[1])  # noqa: E731
        yield Case(f"{rows} x {s.vocab}", _over(_logits(s, rows), call), rows * s.vocab * 2)


@case
def draw(s: Shape) -> Iterator[Case]:
    ways = {"temperature": (0, 1.0, 0.0), "top-k": (50, 1.0, 0.0), "top-p": (0, 0.9, 0.0), "min-p": (0, 1.0, 0.05)}
    rows = s.batch
    for name, (top_k, top_p, min_p) in {**ways, "all three": (50, 0.9, 0.05)}.items():
        state = [s.ints(range(rows)), *(s.ints([1] * rows) for _ in range(3))]
        full = lambda value: torch.full((rows,), value, device=s.device)  # noqa: E731
        seeds = torch.arange(rows, device=s.device)
        settings = SlotSettings(full(0.8), full(top_k).int(), full(top_p), full(min_p), seeds)
        scratch = draw_scratch(rows, s.vocab, torch.device(s.device))
        call = lambda x, a=(state, settings, scratch): advance_drawn(x, *a[0], a[1], a[2])  # noqa: E731
        yield Case(f"{rows} x {s.vocab}, {name}", _over(_logits(s, rows), call), rows * s.vocab * 2)


@case
def sampling(s: Shape) -> Iterator[Case]:
    rows = s.batch
    logits = s.random(rows, s.vocab).float()
    column = lambda value, dtype: np.full(rows, value, dtype)  # noqa: E731
    keys = stream_keys(np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64))
    params = RowParams(
        column(0.8, np.float32), column(50, np.int64), column(0.9, np.float32), column(0.05, np.float32), keys
    )
    call = lambda: sample(logits, range(rows), params, [None] * rows)  # noqa: E731
    yield Case(f"{rows} x {s.vocab}, all three", [call], rows * s.vocab * 4, in_graph=False)


def _logits(s: Shape, rows: int) -> list[Tensor]:
    return [s.random(rows, s.vocab) for _ in range(s.copies(rows * s.vocab * 2))]


@case
def copy_blocks_(s: Shape) -> Iterator[Case]:
    _, k, d = s.heads
    layers = s.copies(2 * k * PAGE * d * 2, 36)
    for count in (1, s.batch):
        source, target = (s.random(count * 2, layers, 2, k, PAGE, d) for _ in range(2))
        size = source[0].numel() * 2
        ids = torch.stack([torch.randperm(count * 2, device=s.device)[:count].int() for _ in range(2)], 1).contiguous()
        call = lambda a=(target, source, ids, size): copy_blocks(*a)  # noqa: E731
        yield Case(f"{count} of {size / 1e6:.1f} MB", [call], 2 * count * size)


@case
def dequantize_(s: Shape) -> Iterator[Case]:
    rows, columns = s.ffn, s.hidden
    for name, wide, scale in (
        ("FP8 in 128 x 128", columns, (-(-rows // 128), -(-columns // 128))),
        ("FP4 in groups of 32", columns // 2, (rows, columns // 32)),
    ):
        codes = [
            torch.randint(0, 120, (rows, wide), dtype=torch.uint8, device=s.device)
            for _ in range(s.copies(rows * (wide + 2 * columns)))
        ]
        scales = torch.ones(scale, device=s.device).to(torch.float8_e8m0fnu)
        weights = [code.view(torch.float8_e4m3fn) if wide == columns else code for code in codes]
        calls = _over(weights, lambda w, scales=scales: dequantize(w, scales))  # type: ignore[misc]
        yield Case(f"{rows} x {columns}, {name}", calls, rows * (wide + 2 * columns))
