"""rms_norm in Triton: a program a row."""

from __future__ import annotations

import triton
import triton.language as tl


def launch(x, delta, weight, eps, normed):
    """Arguments as checked by rms_norm."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, delta, weight, normed, width, eps, BLOCK=block, PARTS=0 if delta is None else delta.shape[0] // rows,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


@triton.jit
def _norm(x, delta, weight, normed, width, eps, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    inside = i < width
    value = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(PARTS):
            value += tl.load(delta + row * PARTS + part * width + i, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
        tl.store(x + row + i, value, mask=inside)
        value = value.to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * root * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + i, value.to(normed.dtype.element_ty), mask=inside)
