"""Weights that stay in FP8 on a GPU: quantized as they are loaded, or as a checkpoint has them. Knows no model.

E4M3 with a float32 scale a block of 128 x 128. Elsewhere than on such a GPU the products are emulated, for tests and
for figures of quality: a service that asks for them there is refused.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.formats import BLOCK
from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.linear import Projection
from flowinfer.engine.models.moe import StackedExperts
from flowinfer.engine.models.named import RandomWeights
from flowinfer.engine.weights import Weights
from flowinfer.errors import ModelError
from flowinfer.kernels import arch
from flowinfer.kernels.fp8_linear import (
    FEW_ROWS,
    GROUP,
    Fp8Weight,
    fp8_linear,
    quantize_rows_reference,
    quantize_weight,
)
from flowinfer.kernels.fp8_linear.reference import widened

OTHERS = "DeepseekV4ForCausalLM"


def runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of FP8 weights run there, for a model of this dtype."""
    return arch.supported("fp8_linear", str(device), str(dtype).removeprefix("torch."))


def refuse(device: torch.device, dtype: torch.dtype, config: ModelConfig, *, batch_invariant: bool) -> None:
    """Raises ModelError where `weights: fp8` can't be had."""
    if config.architecture == OTHERS:
        text = f"`weights: fp8` isn't for {OTHERS}, whose products are the library's."
        raise ModelError(text, help="Leave `weights` out: what its files have in FP8 becomes `dtype` as it is loaded.")
    if batch_invariant:
        text = "`weights: fp8` breaks batch_invariant: products of few and of many rows round differently."
        raise ModelError(text, help="Leave one of the two out.")
    if not runs(device, dtype):
        needs = arch.BY_OP["fp8_linear"]
        lacks = arch.missing(needs, arch.capability_of(str(device)), str(dtype).removeprefix("torch."))
        raise ModelError(f"`weights: fp8` on {device} needs {lacks}.", help="Leave `weights` out.")


def refuse_kv(model: object, *, batch_invariant: bool) -> None:
    """Raises ModelError where `kv_dtype: fp8` can't be had for this model on its device."""
    from flowinfer.engine.models.fused import FusedModel  # here: it needs Triton's kernels

    if batch_invariant:
        text = "`kv_dtype: fp8` breaks batch_invariant: a step sees its own keys and values before they are rounded."
        raise ModelError(text, help="Leave one of the two out.")
    if not isinstance(model, FusedModel) or not runs(model.device, model.dtype):
        text = "`kv_dtype: fp8` needs a GPU of compute capability 8.9, and a model in bfloat16 that isn't DeepSeek-V4."
        raise ModelError(text, help="Leave `kv_dtype` out.")


class Fp8Linear:
    """The product of a weight in FP8."""

    def __init__(self, weight: Fp8Weight, bias_O: Tensor | None = None) -> None:
        self.weight = weight
        self.bias_O = bias_O
        self._wide: Tensor | None = None  # where it's emulated

    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.device.type == "cuda":
            return fp8_linear(x_TI.contiguous(), self.weight, bias_O=self.bias_O)
        if self._wide is None:
            self._wide = self.weight.wide(torch.float32)
        if x_TI.shape[0] > FEW_ROWS:
            x_TI = widened(*quantize_rows_reference(x_TI), rows=1).to(x_TI.dtype)
        y_TO = F.linear(x_TI.float(), self._wide).to(x_TI.dtype)
        return y_TO if self.bias_O is None else y_TO + self.bias_O


def make_fp8(weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
    """A stand-in for make_linear."""
    return Fp8Linear(quantize_weight(weight_OI), bias_O)


class Fp8Experts(StackedExperts):
    """As StackedExperts; the tensors are codes, gate_up_scale [E, ceil(2 I / rows), G] and down_scale alike."""

    def __init__(
        self, router: Projection, gate_up: Fp8Weight, down: Fp8Weight, *, per_token: int, norm_topk: bool,
        load_E: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            router, gate_up.codes, down.codes, per_token=per_token, norm_topk=norm_topk, load_E=load_E
        )  # fmt: skip
        self.gate_up = gate_up
        self.down = down


def stored(
    files: Weights | RandomWeights, names: list[str], sizes_out: tuple[int, ...], size_in: int
) -> Fp8Weight | None:
    """The rows of several tensors as a checkpoint has them; None where they aren't in FP8 with blocks of BLOCK."""
    if isinstance(files, RandomWeights) or files.scale_block != BLOCK or not all(map(files.scale_of, names)):
        return None
    parts = [files.scaled(name, (size, size_in), BLOCK) for name, size in zip(names, sizes_out, strict=True)]
    return joined([(codes, scale.float()) for codes, scale in parts])


def joined(parts: list[tuple[Tensor, Tensor]]) -> Fp8Weight:
    """Weights one below the other; where their blocks don't follow one another, scales are of fewer rows."""
    offsets = [codes.shape[0] for codes, _ in parts[:-1]]
    rows = math.gcd(GROUP, *offsets)
    scales = [scale.repeat_interleave(GROUP // rows, 0)[: -(-codes.shape[0] // rows)] for codes, scale in parts]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.cat(scales).contiguous(), rows)


def stacked(weights: list[Fp8Weight]) -> Fp8Weight:
    """Weights of one shape as [E, O, I] and [E, ceil(O / rows), G]."""
    codes = torch.stack([weight.codes.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.stack([weight.scale for weight in weights]), weights[0].rows)
