"""A layer of routed experts whose weights are in FP8, as in fp8_linear: the products of kernels/experts over codes.

Up to MOST_ROWS tokens weights are widened on their way and tokens stay as they are. Above, tokens become FP8 once, go
to the products sorted by expert without a copy, and so do the gated rows.

Dimensions: T tokens, H hidden, E experts, I width of an expert, P pairs (token, choice), G groups of 128 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.experts import MOST_ROWS, Routing, bucket, route
from flowinfer.kernels.fp8_experts.reference import fp8_experts_reference
from flowinfer.kernels.fp8_linear import Fp8Rows, Fp8Weight, quantize_rows

__all__ = ["fp8_experts", "fp8_experts_reference", "fp8_gather_gated", "fp8_grouped", "fp8_weighted"]


def fp8_gather_gated(x_TH: Tensor, gate_up: Fp8Weight, routing: Routing) -> Tensor:
    """[P, I] in bfloat16: silu(gate) * up of each pair's token by its expert; gate_up codes [E, 2 I, H]."""
    from flowinfer.kernels.fp8_experts.triton import launch_gated

    _check(x_TH, gate_up, torch.bfloat16)
    top = routing.experts.shape[1]
    out = x_TH.new_empty(x_TH.shape[0] * top, gate_up.codes.shape[1] // 2)
    launch_gated(x_TH, gate_up, routing, out)
    return out


def fp8_weighted(h_PI: Tensor, down: Fp8Weight, routing: Routing) -> Tensor:
    """[P, H] in bfloat16: down_e h of each pair times its weight; down codes [E, H, I]."""
    from flowinfer.kernels.fp8_experts.triton import launch_down

    _check(h_PI, down, torch.bfloat16)
    y = h_PI.new_empty(h_PI.shape[0], down.codes.shape[1])
    launch_down(h_PI, down, routing, y)
    return y


def fp8_grouped(rows: Fp8Rows, stack: Fp8Weight, counts_E: Tensor, num_pairs: int, row_of_P: Tensor | None) -> Tensor:
    """[P, O] in bfloat16: row p by the expert that it falls to when counts_E rows go to each expert in turn.

    row_of_P int32 [P], where given: the row of `rows` that stands at p; without it, p itself.
    """
    from flowinfer.kernels.fp8_experts.triton import launch_grouped

    _check(rows.codes, stack, torch.float8_e4m3fn)
    out = torch.empty(num_pairs, stack.codes.shape[1], dtype=torch.bfloat16, device=rows.codes.device)
    launch_grouped(rows, stack, counts_E, row_of_P, out)
    return out


def fp8_experts(
    x_TH: Tensor,
    logits_TE: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    residual_TH: Tensor,
    top: int,
    *,
    norm_topk: bool,
    load_E: Tensor | None = None,
) -> Tensor:
    """The whole layer behind its router, for any T: residual_TH + experts(x_TH), written over residual_TH.

    As kernels.experts.experts. Raises KernelUnsupported where sizes don't fit.
    """
    from flowinfer.kernels.experts.triton import launch_sum

    num_experts = gate_up.codes.shape[0]
    ids, weights = route(logits_TE, top, norm_topk=norm_topk)
    if x_TH.shape[0] > MOST_ROWS:
        return _sorted(x_TH, ids, weights, gate_up, down, residual_TH, load_E)
    routing = bucket(ids, weights, num_experts)
    if load_E is not None:
        load_E += routing.counts
    y = fp8_weighted(fp8_gather_gated(x_TH, gate_up, routing), down, routing)
    launch_sum(y, None, residual_TH, top)
    return residual_TH


def _sorted(
    x_TH: Tensor, ids: Tensor, weights: Tensor, gate_up: Fp8Weight, down: Fp8Weight, residual_TH: Tensor,
    load_E: Tensor | None,
) -> Tensor:  # fmt: skip
    from flowinfer.kernels.experts.triton import launch_sum

    num_pairs, top = ids.numel(), ids.shape[1]
    chosen, order = ids.flatten().sort(stable=True)
    every = torch.arange(gate_up.codes.shape[0] + 1, dtype=torch.int32, device=ids.device)
    counts = torch.searchsorted(chosen, every, out_int32=True).diff()
    if load_E is not None:
        load_E += counts
    both = fp8_grouped(quantize_rows(x_TH), gate_up, counts, num_pairs, (order // top).int())
    y = fp8_grouped(quantize_rows(both, gated=True), down, counts, num_pairs, None)
    place = torch.empty(num_pairs, dtype=torch.int32, device=order.device)
    place[order] = torch.arange(num_pairs, dtype=torch.int32, device=order.device)
    launch_sum(y, (place, weights), residual_TH, top)
    return residual_TH


def _check(x: Tensor, stack: Fp8Weight, dtype: torch.dtype) -> None:
    _, size_out, size_in = stack.codes.shape
    groups = [-(-size_out // stack.rows), -(-size_in // 128)]
    if x.dtype is not dtype or x.shape[1] != size_in or list(stack.scale.shape[1:]) != groups:
        raise KernelUnsupported(
            f"fp8_experts: {list(x.shape)} {x.dtype}, codes {list(stack.codes.shape)} and scales "
            f"{list(stack.scale.shape)} don't fit."
        )
    if not (x.is_contiguous() and stack.codes.is_contiguous() and stack.scale.is_contiguous()):
        raise KernelUnsupported("fp8_experts needs contiguous rows.")
