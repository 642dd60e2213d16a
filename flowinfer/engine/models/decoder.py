"""One decoder-only transformer; families differ in small parts chosen at load. Owns no KV and no batch.

Dimensions: T tokens of the step, H hidden, N query heads, K kv heads, D head size, V vocabulary, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.invariant import Invariance
from flowinfer.engine.models.linear import Make, Projection, make_linear
from flowinfer.engine.models.moe import ExpertFFN, GatedFFN, StackedExperts
from flowinfer.engine.models.rope import Rope, rotate
from flowinfer.engine.step import StepInput
from flowinfer.kernels.paged_attention import (
    AttentionPlan,
    Sizes,
    paged_attention,
    plan_attention,
    wipe_fresh_blocks,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block. q_norm and k_norm are set in families that norm heads before the rotation."""

    input_norm_H: Tensor
    qkv: Projection
    qk_norm_D: tuple[Tensor, Tensor] | None
    out: Projection
    post_norm_H: Tensor
    ffn: GatedFFN | ExpertFFN | StackedExperts


class Model:
    """Weights of one model on one device and the forward pass over a paged KV arena."""

    def __init__(
        self, config: ModelConfig, embed_VH: Tensor, layers: list[Layer], norm_H: Tensor, head_VH: Tensor, rope: Rope
    ) -> None:
        self.config = config
        self.dtype = embed_VH.dtype
        self.device = embed_VH.device
        self._embed_VH = embed_VH
        self._layers = layers
        self._norm_H = norm_H
        self.expert_load_LE: Tensor | None = None  # what its expert layers add to, where there are any
        self.invariance: Invariance | None = None  # where bytes mustn't depend on the batch
        self._sizes: Sizes | None = None
        self.make_head: Make = make_linear
        self._head_VH: Tensor | None = head_VH
        self._head: Projection | None = None
        self._rope = rope

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """Float32 logits [R, V] of the wanted rows; None where the step wants none.

        kv is the arena [blocks, layers, 2, block_tokens, K, D], contiguous, of the model's dtype: keys and values of
        the step's tokens are written there, and each token attends to all before it and itself.
        """
        plan = self._plan(step, kv)
        wipe_fresh_blocks(kv, plan)
        rope = self._rope.at(step.positions)
        x_TH = F.embedding(step.tokens, self._embed_VH)
        for index, layer in enumerate(self._layers):
            x_TH = self._block(layer, x_TH, kv, index, plan, rope)
            if step.wants(index):
                step.give(index, x_TH[step.logit_rows])
        if step.logit_rows is None:
            return None
        x_RH = F.rms_norm(x_TH[step.logit_rows], (self.config.hidden_size,), self._norm_H, self.config.norm_eps)
        return self._logits(x_RH)

    def keep_invariant(self, invariance: Invariance) -> None:
        """A token's bytes don't depend on what runs beside it. The projections must come from `invariance` too."""
        config = self.config
        self.invariance = invariance
        self._sizes = invariance.attention(config.num_heads, config.num_kv_heads, config.head_dim)

    @property
    def embedding(self) -> Tensor:
        """[V, H] of the model's dtype."""
        return self._embed_VH

    def project(self, x_RH: Tensor) -> Tensor:
        """Float32 logits [R, V] of rows that are normed already, by the output matrix alone; for draft heads."""
        return self._logits(x_RH.to(self.dtype))

    def warmup(self) -> None:
        """Packs the head, which a worker that only prefills never needs; without this the first logits pay 50 ms."""
        self._logits(torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=self.device))

    def _plan(self, step: StepInput, kv: Tensor) -> AttentionPlan:
        config = self.config
        return plan_attention(
            step.query_starts,
            step.kv_lens,
            step.block_tables,
            kv=kv,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            sizes=self._sizes,
        )

    def _block(
        self, layer: Layer, x_TH: Tensor, kv: Tensor, index: int, plan: AttentionPlan, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        config = self.config
        normed = F.rms_norm(x_TH, (config.hidden_size,), layer.input_norm_H, config.norm_eps)
        q_TND, k_TKD, v_TKD = self._heads(layer, normed, rope)
        attended = paged_attention(q_TND, k_TKD, v_TKD, kv, index, plan)
        x_TH = x_TH + layer.out(attended)
        normed = F.rms_norm(x_TH, (config.hidden_size,), layer.post_norm_H, config.norm_eps)
        return x_TH + layer.ffn(normed)

    def _heads(self, layer: Layer, x_TH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values; queries and keys are rotated together."""
        config = self.config
        heads = layer.qkv(x_TH).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        qk, v_TKD = heads[:, :rotated], heads[:, rotated:]
        if layer.qk_norm_D is not None:
            qk = self._norm_heads(qk, *layer.qk_norm_D)
        qk = rotate(qk, *rope)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v_TKD

    def _norm_heads(self, qk: Tensor, q_norm_D: Tensor, k_norm_D: Tensor) -> Tensor:
        q, k = qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]
        shape, eps = (self.config.head_dim,), self.config.norm_eps
        return torch.cat((F.rms_norm(q, shape, q_norm_D, eps), F.rms_norm(k, shape, k_norm_D, eps)), 1)

    def _logits(self, x_RH: Tensor) -> Tensor:
        """The head is packed at its first use: a prefill worker never pays its memory."""
        if self._head is None:
            assert self._head_VH is not None
            self._head, self._head_VH = self.make_head(self._head_VH, None), None
        return self._head(x_RH).float()
