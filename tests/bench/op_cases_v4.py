"""Cases of bench_ops for DeepSeek-V4, in the sizes of V4-Flash; see op_cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from op_cases import Call, Case, Shape, case
from torch import Tensor

from flowinfer.kernels import hyper_connections as hyper
from flowinfer.kernels.compressor import Pool, compress
from flowinfer.kernels.indexer_topk import indexer_topk
from flowinfer.kernels.norm_turn import norm_turn
from flowinfer.kernels.router import choose_experts
from flowinfer.kernels.sparse_attention import Parts, num_splits, sparse_attention, tile_keys
from flowinfer.kernels.token_rows import TokenRows, Turn


class Sizes(NamedTuple):
    """Of the model; context: of a decoding sequence, prompt: tokens of a whole one."""

    heads: int = 64
    head_dim: int = 512
    rotated: int = 64
    window: int = 128
    rate: int = 4
    index_heads: int = 64
    index_dim: int = 128
    index_top: int = 512
    hidden: int = 4096
    streams: int = 4
    experts: int = 256
    chosen: int = 6
    page: int = 256
    context: int = 16_384
    prompt: int = 4096


def sizes(s: Shape) -> Sizes:
    """Small ones for small shapes."""
    if s.hidden >= 1024:
        return Sizes()
    return Sizes(2, 16, 8, 8, 4, 4, 16, 8, 32, 2, 8, 2, 16, 40, 20)


def steps(s: Shape, z: Sizes) -> Iterator[tuple[str, TokenRows]]:
    """A decode step of s.batch sequences, and a whole prompt."""
    for name, sequences, start, count in (
        (f"{s.batch} rows of {z.context}", s.batch, z.context - 1, 1),
        (f"a prompt of {z.prompt}", 1, 0, z.prompt),
    ):
        each = -(-(start + count) // z.page)
        tables = torch.randperm(sequences * each, device=s.device).int().view(sequences, each)
        slot = torch.arange(sequences).repeat_interleave(count)
        position = start + torch.arange(count).repeat(sequences)
        zeros = torch.zeros_like(position)
        columns = (slot, position, zeros + start, zeros + start + count, zeros, zeros)
        on_device = [column.int().to(s.device) for column in columns]
        yield name, TokenRows(*on_device, tables, z.page, count == 1)  # type: ignore[misc]


def arena(s: Shape, rows: TokenRows, *widths: int) -> list[Tensor]:
    """Sections of one arena: so many numbers of each block."""
    blocks = rows.block_tables.numel()
    return list(s.random(blocks, sum(widths)).split(widths, 1))


def turn(s: Shape, z: Sizes, tokens: int) -> Turn:
    """Random rotations."""
    angles = torch.randn(tokens, z.rotated // 2, device=s.device)
    return Turn(angles.cos(), angles.sin())


@case
def sparse_attention_(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    for name, rows in steps(s, z):
        tokens, page = len(rows.slots), z.page
        window, entries = arena(s, rows, page * z.head_dim, page // z.rate * z.head_dim)
        window, entries = (x.unflatten(1, (-1, z.head_dim)) for x in (window, entries))
        seen = (rows.positions + 1) // z.rate
        spread = torch.arange(z.index_top, device=s.device)[None] * seen[:, None].clamp(min=z.index_top) // z.index_top
        chosen, q = spread.int().contiguous(), s.random(tokens, z.heads, z.head_dim)
        sinks, back = torch.zeros(z.heads, device=s.device), turn(s, z, tokens)
        splits = num_splits(z.window, z.index_top, tile_keys(z.head_dim, 2))
        parts = Parts.make(tokens, z.heads, z.head_dim, splits, torch.device(s.device))
        keys = float((seen.clamp(max=z.index_top) + (rows.positions + 1).clamp(max=z.window)).sum())
        call: Call = lambda a=(q, window, entries, rows), c=chosen, t=back, p=parts, n=sinks: sparse_attention(  # type: ignore[misc] # noqa: E731
            *a, reach=z.window, rate=z.rate, sinks_N=n, chosen_TK=c, turn=t, parts=p
        )
        read = keys if rows.single else rows.most_tokens * (1 + 1 / z.rate)  # neighbours read the same keys
        moved = 2 * z.head_dim * (read + 2 * tokens * z.heads)
        yield Case(name, [call], moved, 4 * z.heads * z.head_dim * keys)


@case
def indexer_topk_(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    for name, rows in steps(s, z):
        tokens = len(rows.slots)
        (keys,) = arena(s, rows, z.page // z.rate * z.index_dim)
        keys = keys.unflatten(1, (-1, z.index_dim))
        q, weights = s.random(tokens, z.index_heads, z.index_dim), s.random(tokens, z.index_heads)
        call: Call = lambda a=(q, weights, keys, rows): indexer_topk(*a, rate=z.rate, top=z.index_top)  # type: ignore[misc] # noqa: E731
        scores = float(((rows.positions + 1) // z.rate).sum())
        read = rows.block_tables.numel() * z.page // z.rate * z.index_dim
        moved = 2 * read + 2 * q.numel() + 4 * tokens * z.index_top
        yield Case(name, [call], moved, 2 * z.index_heads * z.index_dim * scores)


@case
def compressor(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    for name, rows in steps(s, z):
        tokens, size = len(rows.slots), z.head_dim
        entries, tail = arena(s, rows, z.page // z.rate * size, 4 * z.rate * 4 * size)
        entries, tail = entries.unflatten(1, (-1, size)), tail.unflatten(1, (-1, 4 * size))
        pool = Pool(torch.randn(z.rate, 2 * size, device=s.device), torch.ones(size, device=s.device), 1e-6)
        x, back = s.random(tokens, 4 * size), turn(s, z, tokens)
        call: Call = lambda a=(x, pool, entries, tail, rows, back): compress(*a)  # type: ignore[misc] # noqa: E731
        yield Case(name, [call], 2 * tokens * (4 * size + size / z.rate))


@case
def norm_turn_(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    for tokens in (s.batch, z.prompt):
        size = 2 * tokens * z.heads * z.head_dim
        xs = [s.random(tokens, z.heads, z.head_dim) for _ in range(s.copies(2 * size))]
        back = turn(s, z, tokens)
        calls: list[Call] = [lambda x=x, t=back: norm_turn(x, eps=1e-6, turn=t) for x in xs]  # type: ignore[misc]
        yield Case(f"{tokens} x {z.heads} heads", calls, 2 * size)


@case
def hyper_connections(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    count = (2 + z.streams) * z.streams
    shapes = ((count, z.streams * z.hidden), (count,), (3,), (z.hidden,))
    weights = [torch.randn(shape, device=s.device) * 0.01 for shape in shapes]
    for tokens in (s.batch, z.prompt):
        x, delta = s.random(tokens, z.streams, z.hidden), s.random(tokens, z.hidden)

        def block(x: Tensor = x, delta: Tensor = delta) -> None:
            mixed = hyper.mix(x, *weights, iterations=20, eps=1e-6, norm_eps=1e-6)
            hyper.spread(x, delta, mixed)

        flops = 2 * tokens * count * z.streams * z.hidden
        yield Case(f"{tokens} rows, mixed and spread", [block], 2 * tokens * z.hidden * (3 * z.streams + 2), flops)


@case
def router(s: Shape) -> Iterator[Case]:
    z = sizes(s)
    bias = torch.randn(z.experts, device=s.device)
    for tokens in (s.batch, z.prompt):
        logits = s.random(tokens, z.experts)
        call: Call = lambda x=logits: choose_experts(x, z.chosen, scale=1.5, bias_E=bias)  # type: ignore[misc] # noqa: E731
        yield Case(f"{tokens} x {z.experts}", [call], tokens * (2 * z.experts + 8 * z.chosen))
