"""What all layers of a step share: which rows to write, which to read, which sequences attend together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MOST_BATCHED_QUERIES = 16  # longer queries attend alone: they fill the cores, and a shared mask would be large
# Sequences attend together, padded to the longest, while padding stays under a quarter or 1,024 tokens: a further
# group costs about what attending to 1,024 tokens does.
MOST_PADDING = 0.25
FREE_PADDING = 1024


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with Q query tokens each, over L keys.

    tokens   their rows of the step: a slice where they lie together, else int64 [B * Q]
    rows     int64 [2 * B * L] rows of the arena, keys then values; None: the step's own K and V are the context
    bias     [B, 1, G * Q, L] added to the scores, or None where nothing is hidden (or only the future, for Q == L)
    """

    tokens: slice | Tensor
    num_sequences: int
    num_queries: int
    rows: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """write_rows int64 [T, 2] are the arena rows of each token's key and value in layer 0; groups cover all tokens."""

    write_rows: Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    query_starts: Int64s
    kv_lens: Int64s
    block_tables: Int64s
    block_stride: int
    block_tokens: int
    group_size: int
    dtype: torch.dtype
    device: torch.device

    def queries(self, s: int) -> int:
        return int(self.query_starts[s + 1] - self.query_starts[s])

    def rows(self, sequence: Int64s, position: Int64s) -> Int64s:
        """Arena rows of keys in layer 0; values lie block_tokens rows later."""
        blocks = self.block_tables[sequence, position // self.block_tokens]
        return blocks * self.block_stride + position % self.block_tokens

    def tensor(self, values: Int64s) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def plan_attention(
    query_starts: Int32s, kv_lens: Int32s, block_tables: Int32s, *, kv: Tensor, num_heads: int
) -> AttentionPlan:
    """The plan of one step over S sequences.

    query_starts int32 [S + 1], kv_lens int32 [S] (this step's tokens included), block_tables int32 [S, blocks] padded
    with any valid id, kv the arena [blocks, layers, 2, block_tokens, K, D], num_heads query heads N.
    """
    assert kv.is_contiguous() and num_heads % kv.shape[4] == 0
    _, layers, _, block_tokens, kv_heads, _ = kv.shape
    step = _Step(
        query_starts.astype(np.int64),
        kv_lens.astype(np.int64),
        block_tables.astype(np.int64),
        block_stride=layers * 2 * block_tokens,
        block_tokens=block_tokens,
        group_size=num_heads // kv_heads,
        dtype=kv.dtype,
        device=kv.device,
    )
    return AttentionPlan(step.tensor(_write_rows(step)), tuple(_groups(step)))


def _write_rows(step: _Step) -> Int64s:
    counts = np.diff(step.query_starts)
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = step.kv_lens - counts - step.query_starts[:-1]
    keys = step.rows(sequence, np.arange(step.query_starts[-1]) + first[sequence])
    return np.stack((keys, keys + step.block_tokens), 1)


def _groups(step: _Step) -> list[Group]:
    counts = np.diff(step.query_starts)
    groups = []
    for queries in np.unique(counts):
        members = np.flatnonzero(counts == queries)
        if queries == 0:
            continue
        if queries > MOST_BATCHED_QUERIES:
            groups += [_group(step, np.array([s])) for s in members]
        else:
            groups += [_group(step, part) for part in split_by_length(members, step.kv_lens)]
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


def _group(step: _Step, members: Int64s) -> Group:
    queries = step.queries(int(members[0]))
    lengths = step.kv_lens[members]
    longest = int(lengths.max())
    alone_from_start = len(members) == 1 and longest == queries
    return Group(
        tokens=_tokens(step, members, queries),
        num_sequences=len(members),
        num_queries=queries,
        rows=None if alone_from_start else _read_rows(step, members, longest),
        bias=None if alone_from_start else _bias(step, lengths, queries, longest),
    )


def _tokens(step: _Step, members: Int64s, queries: int) -> slice | Tensor:
    starts = step.query_starts[members]
    if np.array_equal(starts, starts[0] + np.arange(len(members)) * queries):
        return slice(int(starts[0]), int(starts[0]) + len(members) * queries)
    return step.tensor((starts[:, None] + np.arange(queries)).ravel())


def _read_rows(step: _Step, members: Int64s, longest: int) -> Tensor:
    """Short sequences repeat their last row: what else lies in the arena may be NaN, and 0 * NaN isn't 0."""
    position = np.minimum(np.arange(longest), step.kv_lens[members][:, None] - 1)
    keys = step.rows(members[:, None], position).ravel()
    return step.tensor(np.concatenate((keys, keys + step.block_tokens)))


def _bias(step: _Step, lengths: Int64s, queries: int, longest: int) -> Tensor | None:
    """0 where query i of a sequence may see key j, -inf elsewhere; repeated for the heads folded into the queries."""
    if queries == 1 and int(lengths.min()) == longest:
        return None
    last_seen = lengths[:, None] - queries + np.arange(queries)
    hidden = np.arange(longest) > last_seen[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=step.dtype, device=step.device)
    bias.masked_fill_(torch.from_numpy(hidden).to(step.device), float("-inf"))
    return bias.repeat(1, step.group_size, 1).unsqueeze(1)
