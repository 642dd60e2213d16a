"""Feed-forward blocks: the gated dense one, and a router over many of them. Eager; knows nothing of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.linear import Projection


def zero_load(config: ModelConfig, device: torch.device) -> Tensor | None:
    """int32 [expert layers, experts] for the layers of a model to count their rows in; None for a dense model."""
    if not config.moe_layers:
        return None
    return torch.zeros(len(config.moe_layers), config.num_experts, dtype=torch.int32, device=device)


class GatedFFN:
    """down(silu(gate(x)) * up(x)) with gate and up in one product (SwiGLU, Shazeer 2020). silu: which form of it."""

    def __init__(self, gate_up: Projection, down: Projection, silu: Callable[[Tensor], Tensor] = F.silu) -> None:
        self.gate_up = gate_up
        self.down = down
        self.silu = silu

    def __call__(self, x_TH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TH).chunk(2, -1)
        return self.down(self.silu(gate).mul_(up))


class ExpertFFN:
    """Each token goes to its experts_per_token best experts; their outputs are summed by router weight.

    Router probabilities are float32 over all experts (Mixtral, Qwen3-MoE); norm_topk rescales the chosen to one.
    load_E int32 [E], where given: the rows that each expert got are added there.
    """

    def __init__(
        self,
        router: Projection,
        experts: list[GatedFFN],
        *,
        per_token: int,
        norm_topk: bool,
        load_E: Tensor | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.per_token = per_token
        self.norm_topk = norm_topk
        self.load_E = load_E

    def __call__(self, x_TH: Tensor) -> Tensor:
        weights_TK, experts_TK = self._route(x_TH)
        out_TH = torch.zeros_like(x_TH)
        order = experts_TK.flatten().argsort(stable=True)
        counts = torch.bincount(experts_TK.flatten(), minlength=len(self.experts))
        if self.load_E is not None:
            self.load_E.add_(counts)
        rows = order // self.per_token
        weights = weights_TK.flatten()[order].unsqueeze(-1)
        start = 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if count:
                part = slice(start, start + count)
                out_TH.index_add_(0, rows[part], expert(x_TH[rows[part]]) * weights[part])
            start += count
        return out_TH

    def _route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in x's dtype and expert ids, both [T, K]."""
        scores = self.router(x_TH).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.per_token, -1)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x_TH.dtype), experts


class StackedExperts:
    """The weights of such a layer as two tensors, for kernels that run all experts in one launch. See kernels/experts.

    gate_up_EOH [E, 2 I, H], down_EHI [E, H, I]. load_E as in ExpertFFN, for eager steps.
    """

    def __init__(
        self,
        router: Projection,
        gate_up_EOH: Tensor,
        down_EHI: Tensor,
        *,
        per_token: int,
        norm_topk: bool,
        load_E: Tensor | None = None,
    ) -> None:
        self.router = router
        self.gate_up_EOH = gate_up_EOH
        self.down_EHI = down_EHI
        self.per_token = per_token
        self.norm_topk = norm_topk
        self.load_E = load_E
        if down_EHI.is_cuda:  # what compiles for these sizes does so now, not under the first long prompt
            from flowinfer.kernels.experts import blocks_run

            blocks_run(down_EHI)

    def __call__(self, x_TH: Tensor) -> Tensor:
        from flowinfer.kernels.experts import experts  # here: a worker without a GPU has no Triton

        logits = self.router(x_TH)
        return experts(
            x_TH, logits, self.gate_up_EOH, self.down_EHI, torch.zeros_like(x_TH), self.per_token,
            norm_topk=self.norm_topk, load_E=self.load_E,
        )  # fmt: skip
