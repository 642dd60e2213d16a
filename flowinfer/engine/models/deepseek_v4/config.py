"""A DeepSeek-V4 config.json, and the shape of its KV. Never imports torch; refuses what would change results."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from flowinfer.engine.formats import BLOCK, Block, block_of, refuse_scheme
from flowinfer.engine.layout import KVSection
from flowinfer.engine.models.config import Family, ModelConfig
from flowinfer.errors import ModelError

ARCHITECTURE = "DeepseekV4ForCausalLM"
SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_RATES = {SPARSE: 4, HEAVY: 128}
SPARE_ROWS = 8  # drafts that a step may write and the next take back: the most that decode verifies at once
LEAST_BLOCK = 64


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary frequencies of one kind of layer; factor 0 is plain, else YaRN without its magnitude scale."""

    theta: float
    factor: float = 0.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class V4Config(ModelConfig, frozen=True, kw_only=True):
    """Sizes of a DeepSeek-V4. rates: tokens a compressed entry, by layer, 0 where there are none.

    scale_block: rows and columns of a matrix in FP8 that share a scale.
    """

    rates: tuple[int, ...]
    sparse_layers: frozenset[int]
    hash_layers: frozenset[int]
    main_rope: Rotary
    compress_rope: Rotary
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    swiglu_limit: float
    routed_scale: float
    num_shared: int
    scale_block: Block = BLOCK

    @property
    def block_tokens(self) -> int:
        """Tokens a block: whole groups of every rate, so that a full block needs nothing of an open group."""
        return math.lcm(LEAST_BLOCK, *(rate for rate in self.rates if rate))

    @property
    def num_params(self) -> int:
        """Weights; norms, biases and the mixing of streams are left out (under 1 %)."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        attention = hidden * (self.q_rank + self.head_dim) + self.q_rank * heads + heads * self.o_rank
        attention += self.o_groups * self.o_rank * hidden
        experts = 3 * hidden * self.expert_size * (self.num_experts + self.num_shared) + self.num_experts * hidden
        return embeddings + sum(attention + experts + self._compressor(i) for i in range(self.num_layers))

    def _compressor(self, layer: int) -> int:
        if not self.rates[layer]:
            return 0
        if layer not in self.sparse_layers:
            return 2 * self.hidden_size * self.head_dim
        index = self.q_rank * self.index_heads * self.index_dim + self.hidden_size * self.index_heads
        return 4 * self.hidden_size * (self.head_dim + self.index_dim) + index

    def sections(self) -> tuple[KVSection, ...]:
        """What a block holds: compressed entries and index keys of all layers, window keys, rows of open groups.

        Window keys are kept for every token, so a prefix hit in the pool is exact and needs no replay. Rows of open
        groups are a ring inside the block: the group (with the one before it where groups overlap) and SPARE_ROWS for
        drafts. At the end of a block no group is open, but where they overlap the next one needs the last one's rows.
        """
        found: list[KVSection] = []
        for layer, rate in enumerate(self.rates):
            found.append(KVSection("window", f"{layer}.window", self.block_tokens, self.head_dim))
            if not rate:
                continue
            sparse = layer in self.sparse_layers
            entries, ring = self.block_tokens // rate, self.ring_rows(layer)
            found.append(KVSection("compressed", f"{layer}.entries", entries, self.head_dim))
            width = 2 * self.head_dim * (2 if sparse else 1)
            found.append(KVSection("state", f"{layer}.tail", ring, width, at_end=sparse))
            if sparse:
                found.append(KVSection("compressed", f"{layer}.index", entries, self.index_dim))
                found.append(KVSection("state", f"{layer}.index_tail", ring, 4 * self.index_dim))
        places = ("entries", "state", "rest")
        return tuple(sorted(found, key=lambda section: places.index(section.part)))

    def ring_rows(self, layer: int) -> int:
        """Rows of (value, gate) that a block keeps for the open group of this layer."""
        needed = self.rates[layer] * (2 if layer in self.sparse_layers else 1) + SPARE_ROWS
        return min(self.block_tokens, 1 << (needed - 1).bit_length())


def parse_v4(raw: dict[str, Any], *, eos: int | list[int] | None) -> V4Config:
    """A parsed config.json, in the fields of transformers or of the original release. Raises ModelError, KeyError."""
    _refuse(raw)
    layers = raw["num_hidden_layers"]
    kinds = _layer_kinds(raw, layers)
    rates = dict(_RATES) | (raw.get("compress_rates") or {})
    eos = raw.get("eos_token_id") if eos is None else eos
    rope_dim = raw.get("qk_rope_head_dim") or int(raw["head_dim"] * raw.get("partial_rotary_factor", 1 / 8))
    main, compress = _ropes(raw)
    return V4Config(
        architecture=ARCHITECTURE,
        family=Family(),
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["moe_intermediate_size"],
        num_layers=layers,
        num_heads=raw["num_attention_heads"],
        num_kv_heads=1,
        head_dim=raw["head_dim"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope_theta=main.theta,
        rope_scaling=None,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        expert_size=raw["moe_intermediate_size"],
        num_experts=raw["n_routed_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        rates=tuple(0 if kind == SLIDING else rates[kind] for kind in kinds),
        sparse_layers=frozenset(i for i, kind in enumerate(kinds) if kind == SPARSE),
        hash_layers=_hash_layers(raw, layers),
        main_rope=main,
        compress_rope=compress,
        rope_dim=rope_dim,
        q_rank=raw["q_lora_rank"],
        o_groups=raw["o_groups"],
        o_rank=raw["o_lora_rank"],
        window=raw["sliding_window"],
        index_heads=raw["index_n_heads"],
        index_dim=raw["index_head_dim"],
        index_topk=raw["index_topk"],
        streams=raw["hc_mult"],
        sinkhorn_iterations=raw["hc_sinkhorn_iters"],
        hyper_eps=raw["hc_eps"],
        swiglu_limit=raw["swiglu_limit"],
        routed_scale=raw["routed_scaling_factor"],
        num_shared=raw.get("n_shared_experts", 1),
        scale_block=block_of(raw),
    )


def _layer_kinds(raw: dict[str, Any], layers: int) -> list[str]:
    if raw.get("layer_types"):
        kinds = list(raw["layer_types"])[:layers]
    else:
        kinds = [_OF_RATIO.get(ratio, str(ratio)) for ratio in raw["compress_ratios"]][:layers]
    if unknown := sorted(set(kinds) - {SPARSE, HEAVY, SLIDING}):
        raise ModelError(f"layer_types: {unknown} aren't supported.", help=f"Supported: {SLIDING}, {SPARSE}, {HEAVY}.")
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers.")
    return kinds


def _hash_layers(raw: dict[str, Any], layers: int) -> frozenset[int]:
    kinds = raw.get("mlp_layer_types")
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds) if kind == "hash_moe")
    return frozenset(range(min(layers, raw.get("num_hash_layers", 3))))


def _ropes(raw: dict[str, Any]) -> tuple[Rotary, Rotary]:
    """Plain for window layers; scaled, with a base of its own, for layers with a compressor."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta, wide = float(raw.get("rope_theta", 10_000.0)), float(raw.get("compress_rope_theta", 160_000.0))
    nested = "compress" in rope
    main = rope["main"] if nested else {"rope_theta": theta}
    return _rotary(main, theta), _rotary(rope["compress"] if nested else {**rope, "rope_theta": wide}, wide)


def _rotary(rope: dict[str, Any], theta: float) -> Rotary:
    kind: Literal["default", "yarn"] = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta", theta))
    if kind == "default":
        return Rotary(theta=theta)
    if kind != "yarn" or rope.get("attention_factor", 1.0) != 1.0:
        raise ModelError(f"rope of type {kind!r} isn't supported.", help="Supported: default, yarn without mscale.")
    return Rotary(
        theta=theta,
        factor=float(rope["factor"]),
        original_positions=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
    )


def _refuse(raw: dict[str, Any]) -> None:
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "scoring_func": ("sqrtsoftplus",),
        "norm_topk_prob": (True,),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
    }
    for name, values in wanted.items():
        if name in raw and raw[name] not in values:
            raise ModelError(f"{name}: {raw[name]!r} isn't supported.", help=f"Supported: {values[0]!r}.")
    refuse_scheme(raw, fp8=True)
