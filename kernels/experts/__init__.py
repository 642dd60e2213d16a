"""A layer of routed experts over T tokens without a word from the host: routing, two grouped products, their sum.

Rows of the intermediate results are (token, choice) pairs, T * top of them. Up to MOST_ROWS tokens the products are
ours, with gather, norm, gate and weighting fused in; above, kernels/grouped_experts on Hopper, where the CuTe DSL is
installed, else torch's grouped product.

Dimensions: T tokens, H hidden, E experts, I width of an expert, P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import grouped_experts
from flowinfer.kernels.experts.reference import experts_reference, route_reference

__all__ = ["Routing", "bucket", "experts", "experts_reference", "gather_gated", "route", "route_reference", "weighted"]

MOST_ROWS = 1024  # tokens up to which a list of all pairs for every expert is worth its memory (8 MB at 128 experts)


class Routing(NamedTuple):
    """experts int32 [T, top]: chosen ids, best first. weights float32 [T, top].

    pairs int32 [E, P]: pairs of each expert, ascending, the first counts[e] valid. counts int32 [E].
    """

    experts: Tensor
    weights: Tensor
    pairs: Tensor
    counts: Tensor


def route(logits_TE: Tensor, top: int, *, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, top], weights float32 [T, top]): softmax over all experts, then the best.

    norm_topk rescales the chosen to one. Of equal logits the lowest expert wins. logits [T, E], any float dtype.
    """
    from flowinfer.kernels.experts.triton import launch_route

    if not logits_TE.is_contiguous() or top > logits_TE.shape[1]:
        raise KernelUnsupported(f"experts: can't choose {top} of rows of {list(logits_TE.shape)}.")
    shape = logits_TE.shape[0], top
    ids = torch.empty(shape, dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits_TE.device)
    if shape[0]:
        launch_route(logits_TE, ids, weights, norm_topk)
    return ids, weights


def bucket(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Routing:
    """Lists the pairs of each expert."""
    from flowinfer.kernels.experts.triton import launch_bucket

    num_pairs = ids_TK.numel()
    pairs = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=ids_TK.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device)
    launch_bucket(ids_TK, pairs, counts)
    return Routing(ids_TK, weights_TK, pairs, counts)


def gather_gated(
    x_TH: Tensor,
    gate_up_EOH: Tensor,
    routing: Routing,
    *,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    fixed: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """[P, I]: silu(gate) * up of each pair's token by its expert; gate_up [E, 2 I, H]. norm_H as in skinny_linear.

    limit, where not 0: gate is held below it and up within it (DeepSeek-V4).
    fixed: tiles of one shape whatever the number of rows, so that a row's bytes don't depend on the others.
    """
    from flowinfer.kernels.experts.triton import launch_gated

    top = routing.experts.shape[1]
    out = x_TH.new_empty(x_TH.shape[0] * top, gate_up_EOH.shape[1] // 2)
    launch_gated(x_TH, gate_up_EOH, routing, norm_H, eps, out, fixed, limit)
    return out


def weighted(
    h_PI: Tensor, down_EHI: Tensor, routing: Routing, *, fixed: bool = False, out: Tensor | None = None
) -> Tensor:
    """[P, H]: down_e h of each pair times its weight. A token's output is the sum of its `top` rows.

    fixed as in gather_gated; out: where the result goes.
    """
    from flowinfer.kernels.experts.triton import launch_down

    y = h_PI.new_empty(h_PI.shape[0], down_EHI.shape[1]) if out is None else out
    launch_down(h_PI, down_EHI, routing, y, fixed)
    return y


def experts(
    x_TH: Tensor,
    logits_TE: Tensor,
    gate_up_EOH: Tensor,
    down_EHI: Tensor,
    residual_TH: Tensor,
    top: int,
    *,
    norm_topk: bool,
    load_E: Tensor | None = None,
) -> Tensor:
    """The whole layer behind its router, for any T: residual_TH + experts(x_TH), written over residual_TH.

    x [T, H] is normed already. All contiguous, one dtype. load_E int32 [E], where given: the pairs of each expert are
    added there. Raises KernelUnsupported where sizes don't fit.
    """
    from flowinfer.kernels.experts.triton import launch_sum

    if gate_up_EOH.shape[2] != x_TH.shape[1] or down_EHI.shape[1:] != (x_TH.shape[1], gate_up_EOH.shape[1] // 2):
        raise KernelUnsupported(
            f"experts: {list(x_TH.shape)}, {list(gate_up_EOH.shape)} and {list(down_EHI.shape)} don't fit."
        )
    ids, weights = route(logits_TE, top, norm_topk=norm_topk)
    many = x_TH.shape[0] > MOST_ROWS
    if many and blocks_run(down_EHI):
        return _by_blocks(x_TH, ids, weights, gate_up_EOH, down_EHI, residual_TH, load_E)
    if many and _runs("grouped_mm", x_TH):
        return _by_grouped_mm(x_TH, ids, weights, gate_up_EOH, down_EHI, residual_TH, load_E)
    for first in range(0, x_TH.shape[0], MOST_ROWS):
        part = slice(first, first + MOST_ROWS)
        routing = bucket(ids[part], weights[part], gate_up_EOH.shape[0])
        if load_E is not None:
            load_E += routing.counts
        y = weighted(gather_gated(x_TH[part], gate_up_EOH, routing), down_EHI, routing)
        launch_sum(y, None, residual_TH[part], top)
    return residual_TH


def blocks_run(down_EHI: Tensor) -> bool:
    """Whether kernels/grouped_experts multiplies by such experts here; compiles it the first time that it is asked."""
    num_experts, hidden, width = down_EHI.shape
    here = grouped_experts.fits(hidden, width) and _runs("grouped_experts", down_EHI)
    return here and grouped_experts.ready(hidden, width, num_experts)


def _runs(op: str, tensor: Tensor) -> bool:
    from flowinfer.kernels.arch import supported

    return supported(op, str(tensor.device), str(tensor.dtype).removeprefix("torch."))


def _by_blocks(
    x_TH: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_EOH: Tensor,
    down_EHI: Tensor,
    residual_TH: Tensor,
    load_E: Tensor | None,
) -> Tensor:
    """Pairs in blocks of one expert each; gather and gate are part of the first product."""
    from flowinfer.kernels.experts.triton import launch_sum

    blocks = grouped_experts.lay_out(ids, gate_up_EOH.shape[0])
    if load_E is not None:
        load_E += blocks.counts
    y = grouped_experts.down_rows(grouped_experts.gated_rows(x_TH, gate_up_EOH, blocks), down_EHI, blocks)
    launch_sum(y, (blocks.place, weights), residual_TH, ids.shape[1])
    return residual_TH


def _by_grouped_mm(
    x_TH: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_EOH: Tensor,
    down_EHI: Tensor,
    residual_TH: Tensor,
    load_E: Tensor | None,
) -> Tensor:
    """Pairs sorted by expert, so that each expert's rows lie together; torch's CUTLASS product takes the bounds."""
    from flowinfer.kernels.activation import silu_mul
    from flowinfer.kernels.experts.triton import launch_sum

    top, num_experts = ids.shape[1], gate_up_EOH.shape[0]
    chosen, order = ids.flatten().sort(stable=True)
    every = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
    if load_E is not None:
        load_E += torch.diff(ends, prepend=ends.new_zeros(1))
    rows = x_TH[order // top]
    h = silu_mul(torch._grouped_mm(rows, gate_up_EOH.transpose(1, 2), offs=ends))
    del rows
    y = torch._grouped_mm(h, down_EHI.transpose(1, 2), offs=ends)
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    launch_sum(y, (place, weights), residual_TH, top)
    return residual_TH
