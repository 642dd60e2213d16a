"""A model's config.json, read into what the decoder needs. Never imports torch; refuses what it can't run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from flowinfer.engine.formats import Block, block_of, refuse_scheme
from flowinfer.errors import ModelError

Config = dict[str, Any]


class Family(msgspec.Struct, frozen=True):
    """What one Hugging Face architecture adds to the common decoder, and which of its settings we don't know."""

    qkv_bias: bool = False
    qk_norm: bool = False
    moe: Literal["", "mixtral", "qwen"] = ""
    rope_theta: float = 10_000.0  # where the file leaves it out


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "MixtralForCausalLM": Family(moe="mixtral", rope_theta=1_000_000.0),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, moe="qwen"),
    "DeepseekV4ForCausalLM": Family(),  # read by deepseek_v4.config: it shares little with the rest
}


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's frequency bands: long waves are stretched by factor, short ones kept, between them a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder. Every field is a plain number, so a config prints and compares."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    expert_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = True
    dense_layers: frozenset[int] = frozenset()
    scale_block: Block | None = None  # rows and columns of a matrix in FP8 that share a scale; None: none are

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a router over experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose feed-forward part is a router over experts."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    @property
    def num_params(self) -> int:
        """Weights, tied embeddings counted once; norms and biases are left out (under 0.1 %)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        ffn = sum(3 * self.hidden_size * self._ffn_width(layer) for layer in range(self.num_layers))
        return embeddings + attention * self.num_layers + ffn

    def _ffn_width(self, layer: int) -> int:
        return self.expert_size * self.num_experts if self.is_moe(layer) else self.intermediate_size


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder. Raises ModelError naming the file and the field."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    return parse_config(raw, eos=eos, where=str(folder / "config.json"))


def parse_config(raw: Config, *, eos: int | list[int] | None = None, where: str = "config.json") -> ModelConfig:
    """A parsed config.json as ModelConfig. Raises ModelError naming the unsupported field and value."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ModelError(f"{where}: unknown architecture {architecture}.", help=f"Known: {', '.join(FAMILIES)}.")
    family = FAMILIES[architecture]
    try:
        if architecture == "DeepseekV4ForCausalLM":
            from flowinfer.engine.models.deepseek_v4.config import parse_v4  # here: it builds on this module

            return parse_v4(raw, eos=eos)
        _refuse_unsupported(raw, family, where)
        return ModelConfig(architecture=architecture, family=family, **_sizes(raw, eos, family), **_moe(raw, family))
    except KeyError as error:
        raise ModelError(f"{where}: field {error.args[0]!r} is missing.", help="Is the file complete?") from None
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}", help=error.help) from None


def _sizes(raw: Config, eos: int | list[int] | None, family: Family) -> Config:
    theta, scaling = _rope(raw, family)
    eos = raw.get("eos_token_id") if eos is None else eos
    heads = raw["num_attention_heads"]
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "max_positions": raw["max_position_embeddings"],
        "norm_eps": raw["rms_norm_eps"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        "scale_block": block_of(raw) if raw.get("quantization_config") else None,
    }


def _rope(raw: Config, family: Family) -> tuple[float, RopeScaling | None]:
    """theta and scaling from either place: `rope_theta` + `rope_scaling`, or `rope_parameters` (newer files)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(raw.get("rope_theta") or rope.get("rope_theta") or family.rope_theta)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"rope_scaling of type {kind!r} isn't supported.", help="Supported: default, llama3.")
    fields = {name: rope[name] for name in RopeScaling.__struct_fields__}
    return theta, RopeScaling(**fields)


def _moe(raw: Config, family: Family) -> Config:
    """Router and experts. Newer files say num_local_experts for both families, older Qwen ones num_experts."""
    if not family.moe:
        return {}
    experts = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    common = {"num_experts": experts, "experts_per_token": raw["num_experts_per_tok"]}
    if family.moe == "mixtral":
        return common | {"expert_size": raw["intermediate_size"]}
    sparse_step = raw.get("decoder_sparse_step") or 1
    dense = {layer for layer in range(raw["num_hidden_layers"]) if (layer + 1) % sparse_step}
    return common | {
        "expert_size": raw["moe_intermediate_size"],
        "norm_topk": bool(raw.get("norm_topk_prob", False)),
        "dense_layers": frozenset(dense | set(raw.get("mlp_only_layers") or [])),
    }


def _refuse_unsupported(raw: Config, family: Family, where: str) -> None:
    """Settings that would silently change the results are refused by name."""
    refuse_scheme(raw, fp8=True)
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "pretraining_tp": (1, None),
        "partial_rotary_factor": (1.0, None),
        "use_sliding_window": (False, None),
    }
    for name, values in wanted.items():
        if raw.get(name, values[-1]) not in values:
            raise ModelError(f"{where}: {name}: {raw[name]!r} isn't supported.", help=f"Supported: {values[0]!r}.")
    others = set(raw.get("layer_types") or []) - {"full_attention"}
    if others:
        raise ModelError(f"{where}: layer_types: {sorted(others)} aren't supported.", help="Supported: full_attention.")
    if family.moe == "mixtral" and raw.get("sliding_window") is not None:
        raise ModelError(f"{where}: sliding_window: {raw['sliding_window']} isn't supported.", help="Supported: null.")


def _read_json(path: Path) -> Config:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} doesn't exist.", help="A model folder holds config.json and *.safetensors.") from None
    except ValueError as error:
        raise ModelError(f"{path} isn't JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} isn't a JSON object.")
    return data
