"""Builds a Model from a Hugging Face folder: names of tensors, family by family. The only place that knows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.formats import FP8
from flowinfer.engine.models import fp8
from flowinfer.engine.models.config import ModelConfig, read_config
from flowinfer.engine.models.decoder import Layer, Model
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.fp8 import Fp8Experts, Fp8Linear, make_fp8
from flowinfer.engine.models.invariant import Invariance
from flowinfer.engine.models.linear import Make, Projection, make_linear, make_tiles
from flowinfer.engine.models.moe import ExpertFFN, GatedFFN, StackedExperts, zero_load
from flowinfer.engine.models.named import RandomWeights, wants_random
from flowinfer.engine.models.quantized import Makers, makers
from flowinfer.engine.models.rope import Rope
from flowinfer.engine.weights import Weights
from flowinfer.errors import ModelError
from flowinfer.kernels import compiled
from flowinfer.kernels.fp8_linear import Fp8Weight, quantize_weight

if TYPE_CHECKING:
    from flowinfer.engine.models.deepseek_v4.model import V4Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED_FROM = 1 << 24  # weights from which a model on a CPU runs by compiled loops
Progress = Callable[[int, int], None]  # layers done, layers in all
# Buffers that some checkpoints carry and every reader computes anew.
_HARMLESS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def load(
    folder: Path,
    *,
    dtype: str,
    device: str,
    progress: Progress | None = None,
    batch_invariant: bool = False,
    weights: str = "checkpoint",
) -> Model | V4Model:
    """The model on the device. dtype "auto" is the file's own. Raises ModelError naming file, field or tensor.

    batch_invariant: a token's bytes don't depend on what runs beside it, see `invariant`.  weights: see `quantized`.
    """
    config = read_config(folder)
    chosen = config.dtype if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise ModelError(f"{folder}: dtype {chosen!r} isn't supported.", help=f"Choose {' or '.join(DTYPES)}.")
    if weights == FP8:
        fp8.refuse(torch.device(device), DTYPES[chosen], config, batch_invariant=batch_invariant)
    invariance = Invariance(torch.device(device), DTYPES[chosen]) if batch_invariant else None
    compiles = _pays_to_compile(config, torch.device(device), DTYPES[chosen])
    own = makers(
        weights,
        torch.device(device),
        invariance.wrapping if invariance else lambda make: make,
        tiles=compiles and compiled.pairs_pay(),
    )
    if wants_random(folder):
        with torch.inference_mode():
            random = RandomWeights(dtype=DTYPES[chosen], device=torch.device(device))
            return _Loader(config, random, invariance, own).model(progress)
    place: dict[str, Any] = {"dtype": DTYPES[chosen], "device": torch.device(device)}
    with Weights(folder, **place, scale_block=config.scale_block) as files, torch.inference_mode():
        if isinstance(config, V4Config):
            from flowinfer.engine.models.deepseek_v4.load import build  # here: other families don't pay for it

            return build(config, files, progress, invariance, own)
        return _Loader(config, files, invariance, own).model(progress)


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | RandomWeights,
        invariance: Invariance | None = None,
        own: Makers | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.invariance = invariance
        self.compiles = _pays_to_compile(config, weights.device, weights.dtype)
        plain = make_tiles if self.compiles and compiled.pairs_pay() else make_linear
        if invariance is not None:
            invariance.make = plain
        self.make: Make = plain if invariance is None else invariance.linear  # of what stays as it is
        self.pack, self.make_head = own or Makers(self.make, self.make)
        self.fused = _can_fuse(weights.device, weights.dtype)
        if invariance is not None and weights.device.type != "cpu" and not self.fused:
            raise ModelError(
                f"batch_invariant on {weights.device} needs Triton's kernels, which don't run there.",
                help="`flowinfer doctor` says why. Use `device: cpu`, or leave batch_invariant out.",
            )
        # Whether weights that are in FP8 stay so: those of the checkpoint, and all that are packed so.
        self.keeps_fp8 = self.fused and invariance is None and fp8.runs(weights.device, weights.dtype)
        self.load_LE = zero_load(config, weights.device)

    def model(self, progress: Progress | None) -> Model:
        model = self._built(progress)
        model.expert_load_LE = self.load_LE
        model.make_head = self.make_head
        if self.invariance is not None:
            model.keep_invariant(self.invariance)
        return model

    def _built(self, progress: Progress | None) -> Model:
        config, weights = self.config, self.weights
        shape = (config.vocab_size, config.hidden_size)
        embed_VH = self._joined([("model.embed_tokens.weight", shape[0])], shape[1])
        layers = []
        for index in range(config.num_layers):
            layers.append(self._layer(index))
            if progress:
                progress(index + 1, config.num_layers)
        norm_H = self._vector("model.norm.weight", config.hidden_size)
        head_VH = embed_VH if config.tied_embeddings else self._joined([("lm_head.weight", shape[0])], shape[1])
        weights.finish(ignore=(*_HARMLESS, "lm_head.weight") if config.tied_embeddings else _HARMLESS)
        rope = Rope(config, dtype=weights.dtype, device=weights.device)
        if self.fused:
            from flowinfer.engine.models.fused import FusedModel
            from flowinfer.engine.models.fused_fp8 import Fp8Model, has_fp8
            from flowinfer.engine.models.fused_invariant import InvariantModel

            kind = Fp8Model if has_fp8(layers) else FusedModel if self.invariance is None else InvariantModel
            return kind(config, embed_VH, layers, norm_H, head_VH, rope)
        if self.compiles:
            from flowinfer.engine.models.compiled import CompiledModel
            from flowinfer.engine.models.tiled import TiledModel, can_tile

            return (TiledModel if can_tile(layers) else CompiledModel)(config, embed_VH, layers, norm_H, head_VH, rope)
        return Model(config, embed_VH, layers, norm_H, head_VH, rope)

    def _layer(self, index: int) -> Layer:
        config, name = self.config, f"model.layers.{index}."
        return Layer(
            input_norm_H=self._vector(f"{name}input_layernorm.weight", config.hidden_size),
            qkv=self._qkv(f"{name}self_attn."),
            qk_norm_D=self._qk_norm(f"{name}self_attn.") if config.family.qk_norm else None,
            out=self._linear([f"{name}self_attn.o_proj"], config.num_heads * config.head_dim, config.hidden_size),
            post_norm_H=self._vector(f"{name}post_attention_layernorm.weight", config.hidden_size),
            ffn=self._experts(name, index) if config.is_moe(index) else self._dense(f"{name}mlp."),
        )

    def _qkv(self, name: str) -> Projection:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        parts = [f"{name}{part}_proj" for part in "qkv"]
        sizes = [count * config.head_dim for count in heads]
        return self._linear(parts, config.hidden_size, *sizes, bias=config.family.qkv_bias)

    def _qk_norm(self, name: str) -> tuple[Tensor, Tensor]:
        size = self.config.head_dim
        return self._vector(f"{name}q_norm.weight", size), self._vector(f"{name}k_norm.weight", size)

    def _dense(self, name: str) -> GatedFFN:
        return self._ffn(name, ("gate_proj", "up_proj", "down_proj"), self.config.intermediate_size)

    def _experts(self, name: str, index: int) -> ExpertFFN | StackedExperts:
        config = self.config
        load_E = None if self.load_LE is None else self.load_LE[config.moe_layers.index(index)]
        mixtral = config.family.moe == "mixtral"
        block = f"{name}block_sparse_moe." if mixtral else f"{name}mlp."
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        router = self.make(self._joined([(f"{block}gate.weight", config.num_experts)], config.hidden_size), None)
        if self.fused:
            routing: Any = {"per_token": config.experts_per_token, "norm_topk": config.norm_topk, "load_E": load_E}
            if packed := self._stacked_fp8(f"{block}experts.", parts):
                return Fp8Experts(router, *packed, **routing)
            return StackedExperts(router, *self._stacked(f"{block}experts.", parts), **routing)
        experts = [self._ffn(f"{block}experts.{i}.", parts, config.expert_size) for i in range(config.num_experts)]
        return ExpertFFN(router, experts, per_token=config.experts_per_token, norm_topk=config.norm_topk, load_E=load_E)

    def _stacked(self, name: str, parts: tuple[str, str, str]) -> tuple[Tensor, Tensor]:
        """gate and up [E, 2 I, H], down [E, H, I]; each tensor goes straight to its place."""
        config, take = self.config, self.weights.take
        num, width, hidden = config.num_experts, config.expert_size, config.hidden_size
        gate_up, down = self._empty(num, 2 * width, hidden), self._empty(num, hidden, width)
        for i in range(num):
            gate, up, out = (f"{name}{i}.{part}.weight" for part in parts)
            take(gate, (width, hidden), out=gate_up[i, :width])
            take(up, (width, hidden), out=gate_up[i, width:])
            take(out, (hidden, width), out=down[i])
        self.weights.settle()
        return gate_up, down

    def _stacked_fp8(self, name: str, parts: tuple[str, str, str]) -> tuple[Fp8Weight, Fp8Weight] | None:
        """As _stacked, in FP8: as the checkpoint has them, or quantized; None where they are to stay as they are."""
        config = self.config
        gate, up, down = parts
        pairs = []
        for i in range(config.num_experts):
            both = self._fp8([f"{name}{i}.{gate}", f"{name}{i}.{up}"], config.hidden_size, *[config.expert_size] * 2)
            one = self._fp8([f"{name}{i}.{down}"], config.expert_size, config.hidden_size)
            if both is None or one is None:
                return None
            pairs.append((both, one))
        return fp8.stacked([both for both, _ in pairs]), fp8.stacked([one for _, one in pairs])

    def _fp8(self, names: list[str], size_in: int, *sizes_out: int) -> Fp8Weight | None:
        """The rows of several weights in FP8, where they are so in the file or are to become so."""
        full = [f"{name}.weight" for name in names]
        kept = fp8.stored(self.weights, full, sizes_out, size_in) if self.keeps_fp8 else None
        if kept is None and self.pack is make_fp8:
            return quantize_weight(self._joined(list(zip(full, sizes_out, strict=True)), size_in))
        return kept

    def _ffn(self, name: str, parts: tuple[str, str, str], width: int) -> GatedFFN:
        gate, up, down = (name + part for part in parts)
        hidden = self.config.hidden_size
        silu = F.silu if self.invariance is None else self.invariance.silu
        return GatedFFN(self._linear([gate, up], hidden, width, width), self._linear([down], width, hidden), silu)

    def _linear(self, names: list[str], size_in: int, *sizes_out: int, bias: bool = False) -> Projection:
        """One product over the rows of several tensors."""
        parts = list(zip(names, sizes_out, strict=True))
        biases = self._joined([(f"{name}.bias", size) for name, size in parts]) if bias else None
        if packed := self._fp8(names, size_in, *sizes_out):
            return Fp8Linear(packed, biases)
        return self.pack(self._joined([(f"{name}.weight", size) for name, size in parts], size_in), biases)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._joined([(name, size)])

    def _joined(self, parts: list[tuple[str, int]], *rest: int) -> Tensor:
        """Tensors one below the other, in memory of their own: a view of the file would keep all of it mapped."""
        joined, first = self._empty(sum(rows for _, rows in parts), *rest), 0
        for name, rows in parts:
            self.weights.take(name, (rows, *rest), out=joined[first : first + rows])
            first += rows
        self.weights.settle()
        return joined

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.weights.dtype, device=self.weights.device)


def _pays_to_compile(config: ModelConfig | V4Config, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled loops run there, and the model is large enough to win back the half second that they load in."""
    if isinstance(config, V4Config):
        return False
    per_layer = config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    runs = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and not compiled.missing()
    return runs and config.num_layers * per_layer >= COMPILED_FROM


def _can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    from flowinfer.kernels.arch import has_triton

    if not has_triton():
        return False
    from flowinfer.engine.models.fused import can_fuse

    return can_fuse(device, dtype)
