"""The decoder on a CPU by compiled loops: what lies between two products is one pass over memory, not five.

A layer is sum and norm, q/k/v, rotation with KV write, attention over the pages, output, sum and norm, gate and up,
activation, down. The products are oneDNN's, or those of quantized weights. `decoder.Model` is the same in plain torch:
it runs where numba is missing. Imports numba.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.decoder import Layer, Model
from flowinfer.engine.models.invariant import Invariance
from flowinfer.engine.models.moe import GatedFFN
from flowinfer.engine.models.rope import Rope
from flowinfer.engine.step import StepInput, blocks_of_tokens
from flowinfer.kernels.activation.cpu import silu_mul, silu_mul_rows
from flowinfer.kernels.norm.cpu import rms_norm, rms_norm_rows
from flowinfer.kernels.paged_attention.cpu import attend, plan_pages, ready
from flowinfer.kernels.rope import Heads
from flowinfer.kernels.rope.cpu import rope_write, rope_write_rows


class CompiledModel(Model):
    """Weights of one model on a CPU. Keys and values that nobody wrote are never read: kv may hold anything there."""

    def __init__(
        self, config: ModelConfig, embed_VH: Tensor, layers: list[Layer], norm_H: Tensor, head_VH: Tensor, rope: Rope
    ) -> None:
        super().__init__(config, embed_VH, layers, norm_H, head_VH, rope)
        self._heads_of = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._rope_PD = (rope.cos_PD, rope.sin_PD)
        self._norms = [(layer.input_norm_H.float(), layer.post_norm_H.float()) for layer in layers]
        self._qk_norms = [_singles(layer.qk_norm_D) for layer in layers]
        self._last_norm_H = norm_H.float()
        for kernel in (rms_norm_rows, rope_write_rows, silu_mul_rows):
            _ = kernel.address  # compiled now, not under the first prompt
        ready(self.dtype, config.head_dim)

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """As Model.forward."""
        eps = self.config.norm_eps
        kv = kv.view(*kv.shape[:3], self._heads_of.num_kv_heads, -1, self._heads_of.head_dim)
        counts = step.query_starts[1:] - step.query_starts[:-1]
        blocks = torch.from_numpy(blocks_of_tokens(step, counts, kv.shape[4]))
        invariant = self.invariance is not None
        plan = plan_pages(step.query_starts, step.kv_lens, step.block_tables, self._heads_of, kv, invariant=invariant)
        x, delta = F.embedding(step.tokens, self._embed_VH), None
        for index, layer in enumerate(self._layers):
            first_norm_H, second_norm_H = self._norms[index]
            x, normed = rms_norm(x, first_norm_H, eps, delta=delta)
            queries = rope_write(
                layer.qkv(normed), kv, index, self._heads_of, step.positions, blocks, self._rope_PD,
                self._qk_norms[index], eps,
            )  # fmt: skip
            if step.logit_rows is None and index == len(self._layers) - 1:
                return None  # keys and values were all that was wanted: what follows serves logits
            x, normed = rms_norm(x, second_norm_H, eps, delta=layer.out(attend(queries, kv, index, plan)))
            delta = self._feed_forward(layer, normed)
            if step.wants(index):
                step.give(index, (x + delta)[step.logit_rows])
        assert step.logit_rows is not None, "a step without logits has returned from its last layer"
        rows = x[step.logit_rows]
        delta = delta[step.logit_rows] if delta is not None else None
        return self._logits(rms_norm(rows, self._last_norm_H, eps, delta=delta)[1])

    def keep_invariant(self, invariance: Invariance) -> None:
        """As Model.keep_invariant: the loops treat each row by itself, so there is nothing of attention to prove."""
        self.invariance = invariance

    def _feed_forward(self, layer: Layer, normed: Tensor) -> Tensor:
        if isinstance(layer.ffn, GatedFFN):
            return layer.ffn.down(silu_mul(layer.ffn.gate_up(normed)))
        return layer.ffn(normed)


def _singles(norms_D: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if norms_D is None else (norms_D[0].float(), norms_D[1].float())
