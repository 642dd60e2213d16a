"""Weights of 4 and 8 bits: the numbers they stand for, by either product, and what a model makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowinfer.engine import hub
from flowinfer.engine.models import load_model, quantized
from flowinfer.engine.models.linear import Linear, PackedLinear
from flowinfer.engine.models.quantized import (
    FEW_ROWS,
    Int4,
    Int8,
    Quantization,
    QuantLinear,
    fits,
    parse,
    quantizing,
    refuse_device,
)
from flowinfer.engine.step import StepInput
from flowinfer.errors import ModelError

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.bfloat16)
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def a_weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * 0.1).to(dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [Quantization(4, 32), Quantization(4, 64), Quantization(4, 128), Quantization(8)])
@pytest.mark.parametrize("shape", [(16, 128), (48, 256), (176, 384)])
def test_both_products_are_of_the_same_numbers(dtype: torch.dtype, how: Quantization, shape: tuple[int, int]) -> None:
    weight = a_weight(*shape, dtype)
    plain = (Int4(weight, how.group) if how.bits == 4 else Int8(weight)).plain().double()
    product = QuantLinear(weight, None, how)
    for rows in (1, 2, FEW_ROWS[how.bits], FEW_ROWS[how.bits] + 1, 17):
        x = torch.randn(rows, shape[1]).to(dtype)
        assert error(product(x), x.double() @ plain.t()) < LOOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_level_is_missed_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = a_weight(64, 256, torch.float32).to(dtype)
    four, eight = Int4(weight, 32), Int8(weight)
    step = four.scale.float().repeat_interleave(32, 1)
    slack = 1.0 if dtype is torch.float32 else 1.6  # scales and offsets of bfloat16 are themselves rounded
    assert bool(((four.plain().float() - weight.float()).abs() <= step * 0.51 * slack).all())
    assert bool(((eight.plain().float() - weight.float()).abs() <= eight.scale.float()[:, None] * 0.7 * slack).all())


def test_finer_groups_lose_less_and_8_bits_less_than_4() -> None:
    weight = a_weight(64, 512, torch.float32)
    losses = [error(Int4(weight, group).plain(), weight) for group in (32, 64, 128)]
    assert losses == sorted(losses) and losses[2] < 0.15
    assert error(Int8(weight).plain(), weight) < losses[0] / 4


def test_constant_and_empty_groups_survive() -> None:
    weight = torch.zeros(16, 64)
    weight[:, 32:] = 0.25
    torch.testing.assert_close(Int4(weight, 32).plain(), weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(Int8(weight).plain(), weight, atol=1e-3, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_few_rows_are_packed_and_many_wide(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = QuantLinear(a_weight(32, 64, torch.float32), None, Quantization(bits))
    few = FEW_ROWS[bits]
    monkeypatch.setattr(product, "_packed", lambda x: "packed")
    monkeypatch.setattr(product, "wide", lambda x: "wide")
    assert [product(torch.zeros(rows, 64)) for rows in (1, few, few + 1)] == ["packed", "packed", "wide"]


@pytest.mark.parametrize("bits", [4, 8])
def test_only_keeps_one_copy(bits: int) -> None:
    weight, bias = a_weight(32, 64, torch.float32), torch.randn(32)
    both, only = (QuantLinear(weight, bias, Quantization(bits, wide=wide)) for wide in (True, False))
    assert only.wide is None
    x = torch.randn(40, 64)
    torch.testing.assert_close(only(x), both(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_without_packed_products_all_rows_are_wide(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = a_weight(32, 64, torch.float32), torch.randn(1, 64)
    wanted = QuantLinear(weight, None, Quantization(bits))(x)
    monkeypatch.setattr(quantized, "has_packed_products", lambda bits: False)
    for wide in (True, False):
        torch.testing.assert_close(QuantLinear(weight, None, Quantization(bits, wide=wide))(x), wanted)


def test_what_doesnt_divide_stays_as_it_is() -> None:
    four, eight = Quantization(4), Quantization(8)
    assert not fits(torch.zeros(20, 64), four) and not fits(torch.zeros(32, 48), four)
    assert fits(torch.zeros(20, 48), eight)
    kept = quantizing(four)(a_weight(20, 64, torch.float32), None)
    assert isinstance(kept, (Linear, PackedLinear))
    assert isinstance(quantizing(four)(a_weight(32, 64, torch.float32), None), QuantLinear)


def test_settings_by_name() -> None:
    assert parse("checkpoint") is None
    assert parse("int4") == (4, 32, True) and parse("int8-only") == (8, 32, False)
    assert parse("int4:128-only") == (4, 128, False)


def test_a_gpu_is_refused_with_what_would_do() -> None:
    refuse_device(torch.device("cpu"), "int4")
    with pytest.raises(ModelError, match="no kernel for it on cuda:1") as told:
        refuse_device(torch.device("cuda:1"), "int4")
    assert "device: cpu" in told.value.help


def products(model: Any) -> list[QuantLinear]:
    """Every quantized product of a model, wherever it hangs."""
    found: list[QuantLinear] = []
    seen: set[int] = set()
    left = [model]
    while left:
        at = left.pop()
        if id(at) in seen or isinstance(at, (torch.Tensor, str, int, float, type(None))):
            continue
        seen.add(id(at))
        if isinstance(at, QuantLinear):
            found.append(at)
        elif isinstance(at, (list, tuple)):
            left += at
        elif type(at).__module__.startswith("flowinfer"):
            names: Any = getattr(at, "__dict__", None) or getattr(at, "__slots__", ())
            left += [getattr(at, name) for name in names]
    return found


def small_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-only"])
def test_a_model_gives_the_logits_of_its_quantized_numbers(tmp_path: Path, weights: str) -> None:
    """Whole, where rows are many, and token by token, where they are few."""
    small_llama(tmp_path)
    folder, how = tmp_path / "plain", parse(weights)
    assert how is not None
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            in_four = how.bits == 4 and "lm_head" not in name
            tensors[name] = (Int4(tensor, how.group) if in_four else Int8(tensor)).plain()
    save_file(tensors, folder / "model.safetensors")
    tokens = list(range(3, 43))
    wanted = logits(load_model(folder, dtype="float32"), tokens, len(tokens))
    model = load_model(tmp_path, dtype="float32", weights=weights)
    for step in (len(tokens), 1):
        assert error(logits(model, tokens, step), wanted) < 1e-4
    assert len(products(model)) == 4 * 2 + 1


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    experts: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path)
    model: Any = load_model(tmp_path, dtype="float32", weights="int4")
    logits(model, [3, 4], 2)
    assert not isinstance(model._layers[0].ffn.router, QuantLinear)
    assert len(products(model)) == 2 + 2 * 16 + 1


def test_deepseek_v4_keeps_compressors_indexer_and_routers() -> None:
    model: Any = load_model(hub.resolve("flowinfer-mini"), weights="int4")
    layer = model._layers[2]
    assert not products([layer.attention.compressor, layer.attention.indexer, layer.ffn.gate_EH])
    assert len(products(layer.attention)) == 4 and len(products(layer.ffn)) == 2 * 17


def test_a_model_that_keeps_its_bytes_does_so_in_4_bits(tmp_path: Path) -> None:
    small_llama(tmp_path)
    model = load_model(tmp_path, dtype="float32", weights="int4-only", batch_invariant=True)
    tokens = list(range(3, 43))
    assert torch.equal(logits(model, tokens, len(tokens)), logits(model, tokens, 1))


def logits(model: Any, tokens: list[int], step: int) -> torch.Tensor:
    """Of these tokens, `step` at a time."""
    config = model.config
    shape = (4, config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    kv, table = torch.zeros(shape), np.arange(4, dtype=np.int32)[None]
    found = []
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        found.append(
            model.forward(
                StepInput(
                    tokens=torch.tensor(part),
                    positions=torch.arange(start, start + len(part)),
                    query_starts=np.array([0, len(part)], np.int32),
                    kv_lens=np.array([start + len(part)], np.int32),
                    block_tables=table,
                    logit_rows=torch.arange(len(part)),
                ),
                kv,
            )
        )
    return torch.cat(found)
