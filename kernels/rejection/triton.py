"""reject in Triton: a program a sequence, three passes over one row of its vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


def launch(p_rows, q_rows, drafts, uniforms, num_drafts, accepted, tokens):
    """Arguments as checked by reject."""
    batch, rows, vocab = p_rows.shape
    _reject[(batch,)](
        p_rows, q_rows, drafts, uniforms, num_drafts, accepted, tokens, vocab,
        K=rows - 1, BK=triton.next_power_of_2(max(rows - 1, 2)), COUNTED=num_drafts is not None, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _weights(p_row, q_row, start, vocab, residual, BLOCK: tl.constexpr):
    """p, or where residual is 1 what of it q doesn't cover, of a block of tokens."""
    i = start + tl.arange(0, BLOCK)
    p = tl.load(p_row + i, mask=i < vocab, other=0.0).to(tl.float64)
    q = tl.load(q_row + i, mask=i < vocab * residual, other=0.0).to(tl.float64)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _reject(
    p_rows, q_rows, drafts, uniforms, num_drafts, accepted, tokens, vocab,
    K: tl.constexpr, BK: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BK)
    limit = tl.full([], K, tl.int32)
    if COUNTED:
        limit = tl.load(num_drafts + b).to(tl.int32)
    real = j < K
    draft = tl.load(drafts + b * K + j, mask=real, other=0)
    p = tl.load(p_rows + (b * (K + 1) + j) * vocab + draft, mask=real, other=0.0).to(tl.float64)
    q = tl.load(q_rows + (b * K + j) * vocab + draft, mask=real, other=0.0).to(tl.float64)
    u = tl.load(uniforms + b * (K + 1) + j, mask=real, other=0.0).to(tl.float64)
    passes = real & (j < limit) & (u * q < p)  # without the division: q = 0 passes only where p says so
    held = tl.minimum(tl.min(tl.where(passes, BK, j), 0), K)
    p_row = p_rows + (b * (K + 1) + held) * vocab
    q_row = q_rows + (b * K + tl.minimum(held, tl.maximum(K - 1, 0))) * vocab
    residual = tl.where(held < limit, 1, 0)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        total += tl.sum(_weights(p_row, q_row, start, vocab, residual, BLOCK), 0)
    if (residual > 0) & (total <= 0):  # p and q are the same
        residual = residual * 0
        for start in range(0, vocab, BLOCK):
            total += tl.sum(_weights(p_row, q_row, start, vocab, residual, BLOCK), 0)
    wanted = tl.load(uniforms + b * (K + 1) + K).to(tl.float64) * total
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], 2147483647, tl.int32)
    last = tl.full([], 0, tl.int32)  # never a token of weight 0
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        weights = _weights(p_row, q_row, start, vocab, residual, BLOCK)
        reached = before + tl.cumsum(weights, 0)
        token = tl.minimum(token, tl.min(tl.where((reached > wanted) & (i < vocab), i, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, i, 0), 0))
        before += tl.sum(weights, 0)
    tl.store(accepted + b, held.to(tl.int64))
    tl.store(tokens + b, tl.minimum(token, last).to(tl.int64))
