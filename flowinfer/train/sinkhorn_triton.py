"""Triton kernels of train.sinkhorn: a program holds some 4 x 4 matrices; backward keeps the steps in scratch memory."""

# mypy: ignore-errors
# Triton's language is Python to a parser, not to a type checker.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE = 4
ROWS = 64


@triton.jit
def _forward(x_ptr, out_ptr, count, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    side = tl.arange(0, 4)
    at = rows[:, None, None] * 16 + side[None, :, None] * 4 + side[None, None, :]
    mask = rows[:, None, None] < count
    x = tl.load(x_ptr + at, mask=mask, other=1.0)
    x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
        x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    tl.store(out_ptr + at, x, mask=mask)


@triton.jit
def _backward(x_ptr, grad_ptr, out_ptr, scratch_ptr, count, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    side = tl.arange(0, 4)
    at = rows[:, None, None] * 16 + side[None, :, None] * 4 + side[None, None, :]
    mask = rows[:, None, None] < count
    step = count.to(tl.int64) * 16
    x = tl.load(x_ptr + at, mask=mask, other=1.0)
    for i in range(ITERATIONS - 1):
        tl.store(scratch_ptr + 2 * i * step + at, x, mask=mask)
        x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
        tl.store(scratch_ptr + (2 * i + 1) * step + at, x, mask=mask)
        x = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    total = tl.sum(x, axis=1, keep_dims=True) + eps
    grad = (grad - tl.sum(grad * x / total, axis=1, keep_dims=True)) / total
    for j in range(ITERATIONS - 1):
        i = ITERATIONS - 2 - j
        x = tl.load(scratch_ptr + (2 * i + 1) * step + at, mask=mask, other=1.0)
        total = tl.sum(x, axis=2, keep_dims=True) + eps
        grad = (grad - tl.sum(grad * x / total, axis=2, keep_dims=True)) / total
        x = tl.load(scratch_ptr + 2 * i * step + at, mask=mask, other=1.0)
        total = tl.sum(x, axis=1, keep_dims=True) + eps
        grad = (grad - tl.sum(grad * x / total, axis=1, keep_dims=True)) / total
    tl.store(out_ptr + at, grad, mask=mask)


def forward(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalised float32 [..., 4, 4]."""
    comb = _checked(comb)
    out = torch.empty_like(comb)
    count = comb.numel() // SIDE**2
    _forward[(triton.cdiv(count, ROWS),)](comb, out, count, eps, ITERATIONS=iterations, ROWS=ROWS)
    return out


def backward(comb: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of the input, float32 [..., 4, 4]."""
    comb, grad = _checked(comb), _checked(grad)
    out = torch.empty_like(comb)
    scratch = torch.empty(2 * iterations - 2, *comb.shape, device=comb.device)
    count = comb.numel() // SIDE**2
    grid = (triton.cdiv(count, ROWS),)
    _backward[grid](comb, grad, out, scratch, count, eps, ITERATIONS=iterations, ROWS=ROWS)
    return out


def _checked(x: Tensor) -> Tensor:
    if x.shape[-2:] != (SIDE, SIDE) or x.dtype is not torch.float32:
        raise ValueError(f"sinkhorn: {x.dtype} {list(x.shape)}; the kernel takes float32 [..., {SIDE}, {SIDE}].")
    return x.contiguous()
