"""choose_experts in Triton: a program a token."""

from __future__ import annotations

import triton
import triton.language as tl


def launch(logits, top, scale, bias, chosen, tokens, ids, weights):
    """Arguments as checked by choose_experts."""
    rows, num = logits.shape
    _choose[(rows,)](
        logits, bias, chosen, tokens, ids, weights, num, logits.stride(0), scale,
        TOP=top, WIDTH=ids.shape[1], BT=triton.next_power_of_2(ids.shape[1]), BLOCK=triton.next_power_of_2(num),
        TABLE=chosen is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _score(x):
    """sqrt(softplus(x)); log(1 + e) loses what a small e adds."""
    e = tl.exp(tl.minimum(x, 20.0))
    soft = tl.where(e < 1e-3, e * (1.0 - e * (0.5 - e * 0.33333334)), tl.log(1.0 + e))
    return tl.sqrt(tl.where(x > 20.0, x, soft))


@triton.jit
def _choose(
    logits, bias, chosen, tokens, ids, weights, num, stride, scale,
    TOP: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BT)
    picked = tl.zeros([BT], tl.int32)
    weight = tl.zeros([BT], tl.float32)
    if TABLE:
        token = tl.load(tokens + t)
        picked = tl.load(chosen + token * TOP + k, mask=k < TOP, other=0).to(tl.int32)
        own = tl.load(logits + t * stride + picked, mask=k < TOP, other=0.0).to(tl.float32)
        weight = tl.where(k < TOP, _score(own), 0.0)
    else:
        e = tl.arange(0, BLOCK)
        score = _score(tl.load(logits + t * stride + e, mask=e < num, other=0.0).to(tl.float32))
        left = tl.where(e < num, score + tl.load(bias + e, mask=e < num, other=0.0), float("-inf"))
        for i in tl.static_range(TOP):
            best = tl.max(left, 0)
            which = tl.min(tl.where(left == best, e, BLOCK - 1), 0)
            picked = tl.where(k == i, which, picked)
            weight = tl.where(k == i, tl.sum(tl.where(e == which, score, 0.0), 0), weight)
            left = tl.where(e == which, float("-inf"), left)
    weight = weight / (tl.sum(weight, 0) + 1e-20) * scale
    picked = tl.where(k < TOP, picked, num)
    weight = tl.where(k < TOP, weight, 1.0)
    tl.store(ids + t * WIDTH + k, picked, mask=k < WIDTH)
    tl.store(weights + t * WIDTH + k, weight, mask=k < WIDTH)
