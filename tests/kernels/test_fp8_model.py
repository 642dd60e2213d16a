"""The fused decoder over FP8 weights, under Triton's interpreter: prefill of few and of many rows, and a decode step.

With FLOWINFER_TEST_DEVICE=cuda:0 the same runs compiled on a card.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowinfer.engine.models.config import parse_config
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.models.fp8 import Fp8Linear, make_fp8
from flowinfer.engine.models.fused_fp8 import Fp8Model
from flowinfer.engine.models.linear import Linear
from flowinfer.engine.models.load import _Loader
from flowinfer.engine.models.named import CONFIGS, RandomWeights
from flowinfer.engine.models.quantized import Makers
from flowinfer.engine.step import StepInput
from flowinfer.kernels import decode_attention as decode_module
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.fp8_linear import fp8_linear

pytest.importorskip("triton.runtime.interpreter")
torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("FLOWINFER_TEST_DEVICE", "cpu"))
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHAPES = {"dense": CONFIGS["qwen3-8b"] | SMALL, "experts": CONFIGS["qwen3-30b-a3b"] | SMALL | EXPERTS}
TOKENS = list(range(3, 15))


def built(shape: str, make: Any, *, fused: bool) -> Model:
    random = RandomWeights(dtype=torch.bfloat16, device=DEVICE)
    with torch.inference_mode():
        loader = _Loader(parse_config(SHAPES[shape]), random, None, Makers(make, Linear))
        loader.make, loader.fused = Linear, fused
        return loader.model(None)


def run(model: Any, tokens: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    config, count = model.config, len(tokens)
    shape = (2, config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    kv = torch.zeros(shape, device=DEVICE).to(dtype)
    step = StepInput(
        tokens=torch.tensor(tokens, device=DEVICE),
        positions=torch.arange(count, device=DEVICE),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        block_tables=np.arange(2, dtype=np.int32)[None],
        logit_rows=torch.tensor([count - 1], device=DEVICE),
    )
    return model.forward(step, kv), kv


def decoded(model: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Logits of the last token by a decode step over keys and values of this dtype."""
    _, kv = run(model, TOKENS[:-1], dtype)
    one = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0], [len(TOKENS)], [[0, 1]])]
    last = torch.tensor(TOKENS[-1:], dtype=torch.int32, device=DEVICE)
    logits: Tensor = model.decode(last, DecodeBatch(*one), kv, Scratch.make(1, model.heads, DEVICE))
    return logits.float()


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_many_rows_and_a_decode_step(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode_module, "PROGRAMS", 40)
        monkeypatch.setattr(Fp8Linear, "__call__", lambda self, x: fp8_linear(x, self.weight, bias_O=self.bias_O))
    plain = run(built(shape, Linear, fused=True), TOKENS)[0]
    model = built(shape, make_fp8, fused=True)
    assert isinstance(model, Fp8Model)
    few = run(model, TOKENS)[0]
    assert 1e-3 < error(few, plain) < 0.12
    assert error(decoded(model), few) < 3e-2
    monkeypatch.setattr("flowinfer.engine.models.fused_fp8.FEW_ROWS", 4)
    monkeypatch.setattr("flowinfer.kernels.fp8_linear.FEW_ROWS", 4)
    monkeypatch.setattr("flowinfer.kernels.fp8_experts.MOST_ROWS", 4)
    many = run(model, TOKENS)[0]
    assert 1e-3 < error(many, few) < 0.12


def test_keys_and_values_in_fp8_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode_module, "PROGRAMS", 40)
    model = built("dense", Linear, fused=True)
    plain, rounded = decoded(model), decoded(model, torch.float8_e4m3fn)
    assert 1e-4 < error(rounded, plain) < 0.1
