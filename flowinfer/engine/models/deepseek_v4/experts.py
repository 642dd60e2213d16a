"""The feed-forward part: routed experts, chosen by score or by token id, and one that every token visits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.ops import Product, expert_weights, gated, router_scores
from flowinfer.engine.models.linear import Projection


@dataclass(frozen=True, slots=True)
class Expert:
    """down(gated(gate(x), up(x))), gate and up in one product."""

    gate_up: Projection
    down: Projection
    limit: float
    silu: Product = F.silu

    def __call__(self, x_TH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TH).chunk(2, -1)
        return self.down(gated(gate, up, self.limit, self.silu))


@dataclass(frozen=True, slots=True)
class Experts:
    """bias_E moves the choice only; chosen_VK, where set, is the whole choice (a table by token id).

    load_E int32 [E], where given: the rows that each routed expert got are added there.
    """

    gate_EH: Tensor | Projection
    bias_E: Tensor | None
    chosen_VK: Tensor | None
    routed: list[Expert]
    shared: Expert
    per_token: int
    scale: float
    load_E: Tensor | None = None

    def __call__(self, x_TH: Tensor, tokens_T: Tensor) -> Tensor:
        weights_TK, experts_TK = self._route(x_TH, tokens_T)
        out = torch.zeros_like(x_TH)
        order = experts_TK.flatten().argsort(stable=True)
        rows, weights = order // self.per_token, weights_TK.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(experts_TK.flatten(), minlength=len(self.routed))
        if self.load_E is not None:
            self.load_E.add_(counts)
        start = 0
        for expert, count in zip(self.routed, counts.tolist(), strict=True):
            if count:
                part = slice(start, start + count)
                out.index_add_(0, rows[part], (expert(x_TH[rows[part]]) * weights[part]).to(out.dtype))
            start += count
        return out + self.shared(x_TH)

    def _route(self, x_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        scores = router_scores(x_TH, self.gate_EH)
        if self.chosen_VK is not None:
            experts = self.chosen_VK[tokens_T]
        else:
            assert self.bias_E is not None, "a layer routes by score or by token"
            experts = (scores + self.bias_E).topk(self.per_token, -1).indices
        return expert_weights(scores, experts, self.scale).to(x_TH.dtype), experts
