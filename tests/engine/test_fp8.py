"""Weights in FP8: the numbers that a model then computes with, from either source, and where they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowinfer.engine import hub
from flowinfer.engine.models import fp8, load_model
from flowinfer.engine.models.config import read_config
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.models.fp8 import Fp8Linear, joined, make_fp8
from flowinfer.engine.models.linear import make_linear
from flowinfer.engine.models.load import _Loader
from flowinfer.engine.models.quantized import Makers
from flowinfer.engine.step import StepInput
from flowinfer.engine.weights import Weights
from flowinfer.errors import ModelError
from flowinfer.kernels.fp8_linear import FEW_ROWS, Fp8Weight, quantize_weight

torch.set_num_threads(1)
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TOKENS = list(range(3, 16))  # few enough that activations stay as they are


def small_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, initializer_range=0.15, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)


def is_packed(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "embed" not in name and "lm_head" not in name


def rewritten(source: Path, folder: Path, *, stored: bool, block: int = 128) -> Path:
    """The model of `source` with FP8 weights and their scales, or with the numbers that those stand for."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    out: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_packed(name, tensor):
            out[name] = tensor
            continue
        weight = quantize_weight(tensor)
        if stored:
            out[name] = weight.codes
            out[f"{name}_scale_inv"] = weight.scale
        else:
            out[name] = weight.wide(torch.float32)
    if stored:
        config["quantization_config"] = FP8_CONFIG | {"weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(out, folder / "model.safetensors")
    return folder


def logits(model: Any) -> Tensor:
    config = model.config
    kv = torch.zeros((4, config.num_layers, 2, config.num_kv_heads, 64, config.head_dim), dtype=model.dtype)
    found: Tensor = model.forward(
        StepInput(
            tokens=torch.tensor(TOKENS),
            positions=torch.arange(len(TOKENS)),
            query_starts=np.array([0, len(TOKENS)], np.int32),
            kv_lens=np.array([len(TOKENS)], np.int32),
            block_tables=np.arange(4, dtype=np.int32)[None],
            logit_rows=torch.arange(len(TOKENS)),
        ),
        kv,
    )
    return found


def emulated(folder: Path, *, makes: bool = False, keeps: bool = False) -> Model:
    """The model as a card has it, on this CPU: its products are Fp8Linear's."""
    config = read_config(folder)
    own = Makers(make_fp8, make_linear) if makes else None
    place: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    with Weights(folder, **place, scale_block=config.scale_block) as files, torch.inference_mode():
        loader = _Loader(config, files, None, own)
        loader.keeps_fp8 = keeps
        return loader.model(None)


def test_a_checkpoint_in_fp8_gives_the_logits_of_its_numbers_on_any_device(tmp_path: Path) -> None:
    small_llama(tmp_path)
    wanted = logits(load_model(rewritten(tmp_path, tmp_path / "plain", stored=False), dtype="float32"))
    stored = rewritten(tmp_path, tmp_path / "stored", stored=True)
    torch.testing.assert_close(logits(load_model(stored, dtype="float32")), wanted, atol=1e-4, rtol=1e-4)
    kept = emulated(stored, keeps=True)
    assert all(isinstance(p, Fp8Linear) for x in kept._layers for p in (x.qkv, x.out, x.ffn.gate_up, x.ffn.down))  # type: ignore[union-attr]
    torch.testing.assert_close(logits(kept), wanted, atol=1e-4, rtol=1e-4)


def test_a_plain_checkpoint_is_quantized_as_it_is_loaded(tmp_path: Path) -> None:
    small_llama(tmp_path)
    made, plain = logits(emulated(tmp_path, makes=True)), logits(load_model(tmp_path, dtype="float32"))
    error = float((made - plain).norm() / plain.norm())
    assert 1e-3 < error < 0.25, "weights of random normals lose 3 % each"


def test_parts_of_other_sizes_than_blocks_share_scales_of_fewer_rows() -> None:
    torch.manual_seed(0)
    parts = [quantize_weight(torch.randn(rows, 200)) for rows in (192, 64, 40)]
    whole = joined([(part.codes, part.scale) for part in parts])
    assert whole.rows == 64 and whole.scale.shape == (5, 2)
    assert torch.equal(whole.wide(torch.float32), torch.cat([part.wide(torch.float32) for part in parts]))
    even = joined([(part.codes, part.scale) for part in (quantize_weight(torch.randn(256, 200)), parts[2])])
    assert even.rows == 128


def test_other_blocks_become_plain_numbers(tmp_path: Path) -> None:
    small_llama(tmp_path)
    stored = rewritten(tmp_path, tmp_path / "stored", stored=True, block=64)
    with pytest.raises(ModelError, match="one a block of 64 x 64"):
        load_model(stored, dtype="float32")
    name = "model.layers.0.self_attn.o_proj.weight"
    with Weights(stored, dtype=torch.float32, device=torch.device("cpu"), scale_block=(64, 64)) as files:
        assert fp8.stored(files, [name], (192,), 192) is None


def test_every_token_of_few_rows_is_over_unquantized_activations() -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(64, 256))
    x, wide = torch.randn(FEW_ROWS + 1, 256), weight.wide(torch.float32)
    product = Fp8Linear(weight, torch.ones(64))
    torch.testing.assert_close(product(x[:FEW_ROWS]), x[:FEW_ROWS] @ wide.t() + 1, atol=1e-4, rtol=1e-4)
    many = product(x)
    assert 1e-3 < float((many - x @ wide.t() - 1).norm() / many.norm()) < 5e-2


@pytest.mark.parametrize(
    ("device", "dtype", "invariant", "words"),
    [
        ("cpu", "bfloat16", False, "on cpu needs a CUDA device"),
        ("cpu", "bfloat16", True, "breaks batch_invariant"),
    ],
)
def test_where_it_doesnt_run_it_is_refused(
    tmp_path: Path, device: str, dtype: str, invariant: bool, words: str
) -> None:
    small_llama(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path, device=device, dtype=dtype, weights="fp8", batch_invariant=invariant)


def test_an_older_card_another_dtype_and_deepseek_v4_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(hub.resolve("flowinfer-mini"))
    monkeypatch.setattr("flowinfer.kernels.arch.capability_of", lambda device: (8, 0))
    plain = read_config_like("LlamaForCausalLM")
    with pytest.raises(ModelError, match=r"capability 8.9 \(this card has 8.0\)"):
        fp8.refuse(torch.device("cuda:0"), torch.bfloat16, plain, batch_invariant=False)
    monkeypatch.setattr("flowinfer.kernels.arch.capability_of", lambda device: (9, 0))
    fp8.refuse(torch.device("cuda:0"), torch.bfloat16, plain, batch_invariant=False)
    with pytest.raises(ModelError, match="bfloat16"):
        fp8.refuse(torch.device("cuda:0"), torch.float32, plain, batch_invariant=False)
    with pytest.raises(ModelError, match="DeepseekV4"):
        fp8.refuse(torch.device("cuda:0"), torch.bfloat16, config, batch_invariant=False)


def read_config_like(architecture: str) -> Any:
    from flowinfer.engine.models.config import parse_config

    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64}
    return parse_config({"architectures": [architecture], **sizes, "rms_norm_eps": 1e-5})


def test_keys_and_values_are_named_by_the_weights_that_made_them(tmp_path: Path) -> None:
    small_llama(tmp_path)
    info = hub.describe(tmp_path)
    assert info.layout(weights="fp8").digest != info.layout().digest
    assert info.layout(weights="fp8").quantized == "fp8"


def test_a_weight_keeps_its_blocks() -> None:
    plain = torch.zeros(200, 300)
    plain[150, 290], plain[3, 5] = 7.0, -0.5
    weight = quantize_weight(plain)
    assert isinstance(weight, Fp8Weight) and weight.scale.shape == (2, 3)
    torch.testing.assert_close(weight.wide(torch.float32), plain, rtol=1e-3, atol=0)


def test_keys_and_values_in_fp8_take_half_and_have_names_of_their_own(tmp_path: Path) -> None:
    small_llama(tmp_path)
    info = hub.describe(tmp_path)
    plain, packed = info.layout("bfloat16"), info.layout("bfloat16", kv="fp8")
    assert packed.block_bytes * 2 == plain.block_bytes
    assert packed.digest != plain.digest and packed.dtype == "float8_e4m3fn"
    assert packed.traits()["dtype"] != plain.traits()["dtype"], "what a hand-over compares"


def test_kv_in_fp8_is_refused_by_an_engine_that_cant_read_it(tmp_path: Path) -> None:
    small_llama(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    with pytest.raises(ModelError, match=r"compute capability 8\.9"):
        fp8.refuse_kv(model, batch_invariant=False)
    with pytest.raises(ModelError, match="batch_invariant"):
        fp8.refuse_kv(model, batch_invariant=True)
