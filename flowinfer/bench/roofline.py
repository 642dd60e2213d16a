"""The least time that a step of a decoder can take on a device: each op as long as its bytes or its arithmetic need.

After Williams, Waterman and Patterson, "Roofline" (2009). Pure: sizes in, seconds out. Launches, norms, rotation and
sampling count as nothing, so no engine reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowinfer.engine.models.config import ModelConfig

FP8_ROWS = 16  # rows up to which weights in FP8 are widened


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do. read: bytes a second from its memory. matmul: floating-point operations a second."""

    read: float
    matmul: float


@dataclass(frozen=True, slots=True)
class Op:
    """bytes: read and written. flops: a multiply-add is two."""

    name: str
    bytes: float
    flops: float

    def seconds(self, rates: Rates) -> float:
        """The longer of the two times."""
        return max(self.bytes / rates.read, self.flops / rates.matmul)


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of a number in weights, in what is multiplied by them, and in keys and values."""

    weights: int
    rows: int
    kv: int

    @classmethod
    def of(cls, width: int, *, fp8: bool = False, fp8_kv: bool = False) -> Widths:
        """All the same, but for what is in FP8."""
        return cls(1 if fp8 else width, width, 1 if fp8_kv else width)


def roofline(ops: Sequence[Op], rates: Rates) -> float:
    """Seconds of the ops, one after the other."""
    return sum(op.seconds(rates) for op in ops)


def decode_ops(
    config: ModelConfig,
    batch: int,
    context: float,
    *,
    touched: float | None = None,
    width: int = 2,
    fp8: bool = False,
    fp8_kv: bool = False,
) -> list[Op]:
    """A decode step of `batch` sequences of `context` tokens each, the new one included.

    touched: distinct experts that the batch uses in a layer, on average; None: as many as uniform routing gives.
    width: bytes of a number.  fp8: layers have weights of a byte, and above FP8_ROWS rows are multiplied twice as fast.
    fp8_kv: so have keys and values.
    """
    pairs = batch * context
    layers = _layers(config, batch, pairs, pairs, touched, Widths.of(width, fp8=fp8, fp8_kv=fp8_kv))
    return [*layers, _linear("head", batch, _head(config), Widths.of(width))]


def prefill_ops(
    config: ModelConfig, prompts: int, tokens: int, *, width: int = 2, fp8: bool = False, fp8_kv: bool = False
) -> list[Op]:
    """Whole prompts of `tokens` tokens each, without the head. Causal: half of all query-key pairs."""
    pairs = prompts * tokens * (tokens + 1) / 2
    return _layers(config, prompts * tokens, pairs, prompts * tokens, None, Widths.of(width, fp8=fp8, fp8_kv=fp8_kv))


def expected_touched(num_experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens use if each takes per_token of num_experts at random."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


def _layers(
    config: ModelConfig, tokens: int, pairs: float, keys: float, touched: float | None, width: Widths
) -> list[Op]:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    num_moe = sum(config.is_moe(layer) for layer in range(config.num_layers))
    ops = [
        _linear("qkv", tokens, (hidden, heads + 2 * kv), width),
        Op("attention", 2 * kv * keys * width.kv + 2 * heads * tokens * width.rows, 4.0 * heads * pairs),
        _linear("out", tokens, (heads, hidden), width),
    ] * config.num_layers
    dense = [
        _linear("gate_up", tokens, (hidden, 2 * config.intermediate_size), width),
        _linear("down", tokens, (config.intermediate_size, hidden), width),
    ]
    ops += dense * (config.num_layers - num_moe)
    if num_moe:
        ops += _moe(config, tokens, touched, width) * num_moe
    return ops


def _moe(config: ModelConfig, tokens: int, touched: float | None, width: Widths) -> list[Op]:
    top, expert, hidden = config.experts_per_token, config.expert_size, config.hidden_size
    if touched is None:
        touched = expected_touched(config.num_experts, top, tokens)
    rows = tokens * top
    return [
        _linear("router", tokens, (hidden, config.num_experts), Widths.of(width.rows)),
        _product(
            "experts up", touched * 2 * expert * hidden, tokens * hidden, 4.0 * rows * expert * hidden, tokens, width
        ),
        _product(
            "experts down", touched * expert * hidden, tokens * hidden, 2.0 * rows * expert * hidden, tokens, width
        ),
    ]


def _linear(name: str, rows: int, sizes: tuple[int, int], width: Widths) -> Op:
    size_in, size_out = sizes
    return _product(name, size_in * size_out, rows * (size_in + size_out), 2.0 * rows * size_in * size_out, rows, width)


def _product(name: str, weights: float, numbers: float, flops: float, rows: int, width: Widths) -> Op:
    faster = 2 if width.weights < width.rows and rows > FP8_ROWS else 1
    return Op(name, weights * width.weights + numbers * width.rows, flops / faster)


def _head(config: ModelConfig) -> tuple[int, int]:
    return config.hidden_size, config.vocab_size
