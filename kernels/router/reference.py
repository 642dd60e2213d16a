"""The meaning of choose_experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choose_experts_reference(
    logits_TE: Tensor,
    top: int,
    *,
    scale: float,
    bias_E: Tensor | None = None,
    chosen_VK: Tensor | None = None,
    tokens_T: Tensor | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """As choose_experts, with weights in the dtype of the logits."""
    scores = F.softplus(logits_TE).sqrt()
    if chosen_VK is not None:
        ids = chosen_VK[tokens_T]
    else:
        assert bias_E is not None
        ids = (scores + bias_E).sort(dim=-1, descending=True, stable=True).indices[:, :top]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * scale
    if shared:
        ids = torch.cat((ids, torch.full_like(ids[:, :1], logits_TE.shape[1])), 1)
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), 1)
    return ids.int(), weights
