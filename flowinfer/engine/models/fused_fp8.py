"""The fused decoder over weights in FP8: few rows stay as they are and weights are widened, many rows become FP8 too.

Norms, embedding, head and routers are plain, and so is any projection that a checkpoint left out. Dimensions as in
fused.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.engine.models.decoder import Layer
from flowinfer.engine.models.fp8 import Fp8Experts, Fp8Linear
from flowinfer.engine.models.fused import FusedModel
from flowinfer.engine.models.linear import Projection
from flowinfer.engine.models.moe import GatedFFN, StackedExperts
from flowinfer.kernels.activation import silu_mul
from flowinfer.kernels.experts import Routing
from flowinfer.kernels.fp8_experts import fp8_experts, fp8_gather_gated, fp8_weighted
from flowinfer.kernels.fp8_linear import FEW_ROWS, fp8_linear, fp8_product, fp8_skinny, quantize_rows


def has_fp8(layers: list[Layer]) -> bool:
    """Whether any projection of these layers is in FP8."""
    return any(isinstance(part, (Fp8Linear, Fp8Experts)) for layer in layers for part in _parts(layer))


def _parts(layer: Layer) -> list[object]:
    ffn = layer.ffn
    return [layer.qkv, layer.out, *((ffn.gate_up, ffn.down) if isinstance(ffn, GatedFFN) else (ffn,))]


class Fp8Model(FusedModel):
    """As FusedModel, with weights in FP8."""

    def _take(self, layers: list[Layer]) -> None:
        """The layers' own projections are called."""

    def _project(self, normed: Tensor, index: int) -> Tensor:
        return self._layers[index].qkv(normed)

    def _output(self, attended: Tensor, index: int) -> Tensor:
        return _product(attended, self._layers[index].out)

    def _output_of(self, parts: list[Tensor], counts: tuple[int, ...], index: int) -> Tensor:
        return self._layers[index].out(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _routed(self, normed: Tensor, ffn: StackedExperts, routing: Routing) -> Tensor:
        if not isinstance(ffn, Fp8Experts):
            return super()._routed(normed, ffn, routing)
        return fp8_weighted(fp8_gather_gated(normed, ffn.gate_up, routing), ffn.down, routing)

    def _mixture(self, normed: Tensor, ffn: StackedExperts, x: Tensor) -> Tensor:
        if not isinstance(ffn, Fp8Experts):
            return super()._mixture(normed, ffn, x)
        logits = ffn.router(normed)
        return fp8_experts(
            normed, logits, ffn.gate_up, ffn.down, x, ffn.per_token, norm_topk=ffn.norm_topk, load_E=ffn.load_E
        )

    def _dense(self, normed: Tensor, index: int, *, split: bool = False) -> Tensor:
        ffn = self._layers[index].ffn
        assert isinstance(ffn, GatedFFN), "experts have a way of their own"
        gate_up, down = ffn.gate_up, ffn.down
        if not (isinstance(gate_up, Fp8Linear) and isinstance(down, Fp8Linear)) or gate_up.bias_O is not None:
            return down(silu_mul(gate_up(normed)))
        if normed.shape[0] <= FEW_ROWS:
            gated = fp8_skinny(normed, gate_up.weight, gated=True)
            return fp8_skinny(gated, down.weight, bias_O=down.bias_O, split=split)
        both = fp8_product(quantize_rows(normed), gate_up.weight)
        return fp8_product(quantize_rows(both, gated=True), down.weight, bias_O=down.bias_O, split=split)


def _product(x: Tensor, projection: Projection) -> Tensor:
    """[T, O], or parts of it that the norm behind sums."""
    if isinstance(projection, Fp8Linear):
        return fp8_linear(x, projection.weight, bias_O=projection.bias_O, split=True)
    return projection(x)
