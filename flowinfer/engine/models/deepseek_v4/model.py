"""The forward pass of a DeepSeek-V4 over a paged arena. Owns no KV and no batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.attention import Attention, attend
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.deepseek_v4.experts import Experts
from flowinfer.engine.models.deepseek_v4.ops import head_streams, merge, rms, spread, stream_weights
from flowinfer.engine.models.deepseek_v4.plan import Plan, make_plan
from flowinfer.engine.models.linear import Projection
from flowinfer.engine.step import StepInput


@dataclass(frozen=True, slots=True)
class Hyper:
    """Weights that mix the residual streams around one block, float32: fn [n, M * H], base [n], scale [3 or 1]."""

    fn: Tensor | Projection
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block."""

    attention_hyper: Hyper
    attention_norm: Tensor
    attention: Attention
    ffn_hyper: Hyper
    ffn_norm: Tensor
    ffn: Experts


class V4Model:
    """Weights of one model on one device; `forward` has the contract of engine.models.decoder.Model."""

    def __init__(
        self,
        config: V4Config,
        embed_VH: Tensor,
        layers: list[Layer],
        head_hyper: Hyper,
        norm_H: Tensor,
        head: Projection,
    ) -> None:
        self.config = config
        self.dtype = embed_VH.dtype
        self.device = embed_VH.device
        self.expert_load_LE: Tensor | None = None  # what its expert layers add to
        self._embed_VH, self._layers = embed_VH, layers
        self._head_hyper, self._norm_H, self._head = head_hyper, norm_H, head

    @property
    def embedding(self) -> Tensor:
        """[V, H] of the model's dtype."""
        return self._embed_VH

    def project(self, x_RH: Tensor) -> Tensor:
        """Float32 logits [R, V] of rows that are normed already, by the output matrix alone; for draft heads."""
        return self._head(x_RH.to(self.dtype)).float()

    def warmup(self) -> None:
        """Nothing here is built on first use."""

    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """float32 logits [R, V] of step.logit_rows, or None. kv: the arena [blocks, elements], written first."""
        config = self.config
        plan = make_plan(step, config)
        sections = views(kv, config)
        x = F.embedding(step.tokens, self._embed_VH).unsqueeze(1).expand(-1, config.streams, -1)
        for index, (layer, own) in enumerate(zip(self._layers, sections, strict=True)):
            x = self._block(x, layer, own, plan, step.tokens)
            if step.wants(index):
                step.give(index, x[step.logit_rows].mean(1))
        if step.logit_rows is None:
            return None
        hyper = self._head_hyper
        x = x[step.logit_rows]
        out = head_streams(x, hyper.fn, hyper.base, hyper.scale, eps=config.hyper_eps, norm_eps=config.norm_eps)
        return self._head(rms(out, self._norm_H, config.norm_eps)).float()

    def _block(self, x: Tensor, layer: Layer, sections: dict[str, Tensor], plan: Plan, tokens: Tensor) -> Tensor:
        eps = self.config.norm_eps
        pre, post, comb = self._mix(x, layer.attention_hyper)
        normed = rms(merge(x, pre), layer.attention_norm, eps)
        x = spread(x, attend(normed, layer.attention, sections, plan, self.config), post, comb)
        pre, post, comb = self._mix(x, layer.ffn_hyper)
        return spread(x, layer.ffn(rms(merge(x, pre), layer.ffn_norm, eps), tokens), post, comb)

    def _mix(self, x: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return stream_weights(
            x,
            hyper.fn,
            hyper.base,
            hyper.scale,
            iterations=config.sinkhorn_iterations,
            eps=config.hyper_eps,
            norm_eps=config.norm_eps,
        )


def views(kv: Tensor, config: V4Config) -> list[dict[str, Tensor]]:
    """The sections of each layer as [blocks, rows, width] views of the arena [blocks, elements]."""
    found: list[dict[str, Tensor]] = [{} for _ in range(config.num_layers)]
    start = 0
    for section in config.sections():
        layer, name = section.name.split(".")
        size = section.rows * section.width
        found[int(layer)][name] = kv[:, start : start + size].view(-1, section.rows, section.width)
        start += size
    return found
