"""The meaning of a layer of experts, in plain torch, an expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route_reference(logits_TE: Tensor, top: int, *, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """As route, with weights in float64 for float64 logits."""
    scores = logits_TE.double() if logits_TE.dtype is torch.float64 else logits_TE.float()
    scores = scores.softmax(-1)
    weights, ids = scores.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top], ids[:, :top]
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights


def experts_reference(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_EOH: Tensor, down_EHI: Tensor, residual_TH: Tensor
) -> Tensor:
    """residual_TH + the weighted sum of the chosen experts; leaves its arguments alone."""
    out = residual_TH.clone()
    for expert in range(gate_up_EOH.shape[0]):
        rows, choice = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TH[rows], gate_up_EOH[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down_EHI[expert])
        out.index_add_(0, rows, y * weights_TK[rows, choice].to(y.dtype).unsqueeze(1))
    return out
