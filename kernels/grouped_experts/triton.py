"""Places of pairs in blocks of one expert each, in Triton: a count by chunks, their sums before, then the places."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 128  # pairs of a program: the comparison of all with all stays in registers


def launch_lay_out(ids, top, counts, chunk_counts, place, tokens, owner, num_blocks, block_rows):
    """Arguments as made by lay_out."""
    num_pairs, num_experts = ids.numel(), counts.shape[0]
    chunks, wide = chunk_counts.shape[0], triton.next_power_of_2(num_experts)
    _count[(chunks,)](ids, chunk_counts, num_pairs, num_experts, BE=wide, CHUNK=CHUNK, num_warps=4)
    block = min(4096, triton.next_power_of_2(chunks))
    _before[(num_experts,)](chunk_counts, counts, chunks, num_experts, BLOCK=block, num_warps=4)
    programs = max(chunks, triton.cdiv(owner.shape[0], CHUNK))
    _place[(programs,)](
        ids, counts, chunk_counts, place, tokens, owner, num_blocks, num_pairs, num_experts, owner.shape[0],
        TOP=top, ROWS=block_rows, BE=wide, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _count(ids, chunk_counts, num_pairs, num_experts, BE: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    pair, e = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BE)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    found = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(chunk_counts + chunk * num_experts + e, found, mask=e < num_experts)


@triton.jit
def _before(chunk_counts, counts, chunks, num_experts, BLOCK: tl.constexpr):
    """Turns an expert's counts by chunk into the sums of the chunks before, and writes their total."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, chunks, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = chunk_counts + c * num_experts + expert
        found = tl.load(at, mask=c < chunks, other=0)
        tl.store(at, total + tl.cumsum(found, 0) - found, mask=c < chunks)
        total += tl.sum(found, 0)
    tl.store(counts + expert, total)


@triton.jit
def _place(
    ids, counts, chunk_before, place, tokens, owner, num_blocks, num_pairs, num_experts, most_blocks,
    TOP: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    i, e = tl.arange(0, CHUNK), tl.arange(0, BE)
    count = tl.load(counts + e, mask=e < num_experts, other=0)
    blocks = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)

    if chunk * CHUNK < most_blocks:
        block = chunk * CHUNK + i
        of_block = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
        tl.store(owner + block, tl.minimum(of_block, num_experts - 1), mask=block < most_blocks)
    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))

    pair = chunk * CHUNK + i
    inside = pair < num_pairs
    expert = tl.load(ids + pair, mask=inside, other=-1)
    also = tl.load(ids + chunk * CHUNK + tl.arange(0, CHUNK), mask=inside, other=-1)
    among = tl.sum(((expert[:, None] == also[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    if chunk * CHUNK < num_pairs:
        before = tl.load(chunk_before + chunk * num_experts + e, mask=e < num_experts, other=0)
        start = (ends - blocks) * ROWS + before
        at = tl.sum(tl.where(expert[:, None] == e[None, :], start[None, :], 0), 1) + among
        tl.store(place + pair, at, mask=inside)
        tl.store(tokens + at, pair // TOP, mask=inside)
