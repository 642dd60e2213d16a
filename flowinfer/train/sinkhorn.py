"""Sinkhorn normalisation with a backward pass of its own: one kernel each way instead of 120 and 240 small ones.

As a custom op it is one node to a compiler, which would take minutes over the loop. On a CPU it is plain torch.
Dimensions: M streams; matrices are float32 [..., M, M].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.engine.models.deepseek_v4 import ops


def _axes(iterations: int) -> list[int]:
    """The dimension of each normalisation: columns, then rows and columns."""
    return [-2] + [-1, -2] * (iterations - 1)


@torch.library.custom_op("flowinfer_train::sinkhorn", mutates_args=())
def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """ops.sinkhorn, differentiable in one step."""
    if comb.is_cuda:
        from flowinfer.train import sinkhorn_triton  # here: there is no Triton on some machines

        return sinkhorn_triton.forward(comb, iterations, eps)
    return ops.sinkhorn(comb, iterations, eps).clone()


@sinkhorn.register_fake
def _(comb: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(comb, memory_format=torch.contiguous_format)


@torch.library.custom_op("flowinfer_train::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(comb: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of the input. Of y = x / (sum x + eps) it is (dy - sum(dy y)) / (sum x + eps), step by step back."""
    if comb.is_cuda:
        from flowinfer.train import sinkhorn_triton

        return sinkhorn_triton.backward(comb, grad, iterations, eps)
    steps = []
    for axis in _axes(iterations):
        total = comb.sum(axis, keepdim=True) + eps
        comb = comb / total
        steps.append((axis, total, comb))
    for axis, total, out in reversed(steps):
        grad = (grad - (grad * out).sum(axis, keepdim=True)) / total
    return grad.contiguous()


@sinkhorn_backward.register_fake
def _(comb: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(comb, memory_format=torch.contiguous_format)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    comb, ctx.iterations, ctx.eps = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(comb)


def _back(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
    (comb,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return sinkhorn_backward(comb, grad, ctx.iterations, ctx.eps), None, None  # type: ignore[attr-defined]


sinkhorn.register_autograd(_back, setup_context=_keep)
