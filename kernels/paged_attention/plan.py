"""What all layers of a step share: what to write, what to read, which sequences attend together.

Inside a block the kernel keeps heads first: the bytes are [layers, 2 (K, V), K heads, block_tokens, D]. A page, the
[block_tokens, D] of one head, is then one run of memory: gathering pages gives each head's keys ready for the matrix
products, 3x faster at 16 sequences than gathering tokens and striding over heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowinfer.kernels.paged_attention.invariant import Sizes

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MOST_BATCHED_QUERIES = 16  # longer queries attend alone: they fill the cores, and a shared mask would be large
# Sequences attend together, padded to the longest, while padding stays under a quarter or 1,024 tokens: a further
# group costs about what attending to 1,024 tokens does.
MOST_PADDING = 0.25
FREE_PADDING = 1024
TILE = (
    256  # queries of a long chunk that attend together where chunks are cut into tiles: keys behind them are left out
)


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with Q query tokens each, over L keys: the longest context, rounded up to whole blocks.

    tokens   their rows of the step: a slice where they lie together, else int64 [B * Q]
    pages    int64 [2 * B * K * L / block_tokens] pages of layer 0, keys then values; None: the step's own K and V are
             the whole context
    bias     [B, 1, G * Q, L] in q's dtype, added to the scores: 0 or -inf; None where nothing is hidden
    """

    tokens: slice | Tensor
    num_sequences: int
    num_queries: int
    pages: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """write_rows int64 [T, 2, K]: rows of D numbers, in layer 0, of each token's keys and values.

    fresh_blocks int64: blocks begun but not filled in this step. What an earlier tenant left in them is wiped,
    since even unseen keys are multiplied (by zero, and 0 * NaN isn't 0).
    sizes: for attention that is the same whatever runs beside, see `invariant`; None: by what is fastest.
    """

    write_rows: Tensor
    fresh_blocks: Tensor | None
    groups: tuple[Group, ...]
    block_tokens: int
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    counts: Int64s
    starts: Int64s
    kv_lens: Int64s
    block_tables: Int64s
    num_layers: int
    num_kv_heads: int
    block_tokens: int
    group_size: int
    dtype: torch.dtype
    device: torch.device
    invariant: bool

    def pages(self, blocks: Int64s) -> Int64s:
        """Pages of layer 0: [2, ..., K, n] of blocks [..., n]."""
        of_block = (
            blocks[..., None, :] * (self.num_layers * 2 * self.num_kv_heads) + np.arange(self.num_kv_heads)[:, None]
        )
        return np.stack((of_block, of_block + self.num_kv_heads))

    def tensor(self, values: Int64s) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)


def plan_attention(
    query_starts: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
    *,
    kv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    sizes: Sizes | None = None,
) -> AttentionPlan:
    """The plan of one step over S sequences.

    query_starts int32 [S + 1], kv_lens int32 [S] (this step's tokens included), block_tables int32 [S, blocks] padded
    with any valid id, kv the arena [blocks, layers, 2, block_tokens, K, D] (heads may also come before tokens).
    sizes as in AttentionPlan.
    """
    assert kv.is_contiguous() and num_heads % num_kv_heads == 0
    step = _Step(
        counts=np.diff(query_starts).astype(np.int64),
        starts=query_starts[:-1].astype(np.int64),
        kv_lens=kv_lens.astype(np.int64),
        block_tables=block_tables.astype(np.int64),
        num_layers=kv.shape[1],
        num_kv_heads=num_kv_heads,
        block_tokens=kv.shape[3] * kv.shape[4] // num_kv_heads,
        group_size=num_heads // num_kv_heads,
        dtype=kv.dtype,
        device=kv.device,
        invariant=sizes is not None,
    )
    fresh = _fresh_blocks(step)
    return AttentionPlan(
        write_rows=step.tensor(_write_rows(step)),
        fresh_blocks=step.tensor(fresh) if len(fresh) else None,
        groups=tuple(_groups(step)),
        block_tokens=step.block_tokens,
        sizes=sizes,
    )


def _write_rows(step: _Step) -> Int64s:
    sequence = np.repeat(np.arange(len(step.counts)), step.counts)
    first = step.kv_lens - step.counts - step.starts
    position = np.arange(len(sequence)) + first[sequence]
    blocks = step.block_tables[sequence, position // step.block_tokens]
    pages = step.pages(blocks[:, None])[..., 0].swapaxes(0, 1)
    rows: Int64s = pages * step.block_tokens + (position % step.block_tokens)[:, None, None]
    return rows


def _fresh_blocks(step: _Step) -> Int64s:
    last = step.kv_lens // step.block_tokens
    begun = (step.kv_lens % step.block_tokens > 0) & (step.kv_lens - step.counts <= last * step.block_tokens)
    sequences = np.flatnonzero(begun)
    return step.block_tables[sequences, last[sequences]]


def _groups(step: _Step) -> list[Group]:
    groups = []
    for queries in np.unique(step.counts[step.counts > 0]):
        members = np.flatnonzero(step.counts == queries)
        if queries > MOST_BATCHED_QUERIES and step.invariant:
            groups += [tile for s in members for tile in _tiles(step, int(s), int(queries))]
        elif queries > MOST_BATCHED_QUERIES:
            groups += [_group(step, np.array([s]), int(queries)) for s in members]
        else:
            groups += [_group(step, part, int(queries)) for part in split_by_length(members, step.kv_lens)]
    return groups


def split_by_length(members: Int64s, kv_lens: Int64s) -> list[Int64s]:
    """Members in runs of like context length, so that padding to the longest of a run stays small."""
    order = members[np.argsort(-kv_lens[members], kind="stable")]
    parts, start, used = [], 0, 0
    for i, s in enumerate(order):
        used += int(kv_lens[s])
        padded = int(kv_lens[order[start]]) * (i + 1 - start)
        if padded - used > max(FREE_PADDING, MOST_PADDING * padded):
            parts.append(np.sort(order[start:i]))
            start, used = i, int(kv_lens[s])
    return [*parts, np.sort(order[start:])]


def _tiles(step: _Step, sequence: int, queries: int) -> list[Group]:
    """One sequence in tiles of TILE queries, each over the keys up to its last one."""
    tiles = []
    for first in range(0, queries, TILE):
        count = min(TILE, queries - first)
        length = np.array([step.kv_lens[sequence] - queries + first + count])
        num_blocks = int(-(-length[0] // step.block_tokens))
        start = int(step.starts[sequence]) + first
        tiles.append(
            Group(
                tokens=slice(start, start + count),
                num_sequences=1,
                num_queries=count,
                pages=_read_pages(step, np.array([sequence]), length, num_blocks),
                bias=_bias(step, length, count, num_blocks * step.block_tokens),
            )
        )
    return tiles


def _group(step: _Step, members: Int64s, queries: int) -> Group:
    lengths = step.kv_lens[members]
    longest = int(lengths.max())
    num_blocks = -(-longest // step.block_tokens)
    own_only = len(members) == 1 and longest == queries and not step.invariant
    return Group(
        tokens=_tokens(step, members, queries),
        num_sequences=len(members),
        num_queries=queries,
        pages=None if own_only else _read_pages(step, members, lengths, num_blocks),
        bias=None if own_only else _bias(step, lengths, queries, num_blocks * step.block_tokens),
    )


def _tokens(step: _Step, members: Int64s, queries: int) -> slice | Tensor:
    starts = step.starts[members]
    if np.array_equal(starts, starts[0] + np.arange(len(members)) * queries):
        return slice(int(starts[0]), int(starts[0]) + len(members) * queries)
    return step.tensor((starts[:, None] + np.arange(queries)).ravel())


def _read_pages(step: _Step, members: Int64s, lengths: Int64s, num_blocks: int) -> Tensor:
    """Short sequences repeat their last block where others still have some: any finite numbers would do."""
    last = (lengths - 1) // step.block_tokens
    blocks = step.block_tables[members[:, None], np.minimum(np.arange(num_blocks), last[:, None])]
    return step.tensor(step.pages(blocks).ravel())


def _bias(step: _Step, lengths: Int64s, queries: int, num_keys: int) -> Tensor | None:
    """Key j is hidden from query i of a sequence unless j <= length - queries + i. Repeated for the G folded heads."""
    if queries == 1 and int(lengths.min()) == num_keys:
        return None
    last_seen = lengths[:, None] - queries + np.arange(queries)
    hidden = torch.from_numpy(np.arange(num_keys) > last_seen[:, :, None]).to(step.device)
    bias = torch.zeros(hidden.shape, dtype=step.dtype, device=step.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(1, step.group_size, 1).unsqueeze(1)
