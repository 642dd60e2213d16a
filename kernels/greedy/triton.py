"""advance_greedy in Triton: a program a row and chunk of the vocabulary; the last of a row to finish decides."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.greedy import CHUNK


def launch(logits, slots, last, lengths, chosen, scratch):
    """Arguments as checked by advance_greedy."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    _greedy[(chunks, rows)](
        logits, slots, last, lengths, chosen, *scratch, vocab, chunks,
        BLOCK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip


@triton.jit
def _greedy(
    logits, slots, last, lengths, chosen, values, tokens, arrived, vocab, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a NaN must come out on top, as it does in torch
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, 2147483647), 0)
    tl.store(values + row * chunks + chunk, best)
    tl.store(tokens + row * chunks + chunk, token)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    if before == chunks - 1:
        tl.store(arrived + row, 0)
        c = tl.arange(0, CHUNKS)
        bests = tl.load(values + row * chunks + c, mask=c < chunks, other=float("-inf"), cache_modifier=".cg")
        firsts = tl.load(tokens + row * chunks + c, mask=c < chunks, other=2147483647, cache_modifier=".cg")
        best = tl.max(bests, 0)
        token = tl.min(tl.where(bests == best, firsts, 2147483647), 0)
        finite = (best > float("-inf")) & (best < float("inf"))
        token = tl.where(finite, token, -1)
        tl.store(chosen + row, token)
        slot = tl.load(slots + row)
        if slot >= 0:
            tl.store(last + slot, tl.maximum(token, 0))
            tl.store(lengths + slot, tl.load(lengths + slot) + 1)
