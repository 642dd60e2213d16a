"""A GGUF file becomes the Hugging Face folder that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf as gguf_library
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from flowinfer.engine import gguf
from flowinfer.engine.models import load_model
from flowinfer.errors import ModelError

HEADS, KV_HEADS, HIDDEN, FFN = 4, 2, 64, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc0123456789", "Ġ", "ab", "12"]
Floats = npt.NDArray[np.float32]


def _weights() -> dict[str, Floats]:
    """Hugging Face names of one layer."""
    rng = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    shapes = {
        "model.embed_tokens": (len(TOKENS), HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HEADS * head_dim, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * head_dim),
        "model.layers.0.mlp.gate_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, FFN),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _interleaved(values: Floats, heads: int) -> Floats:
    """What converters to GGUF do to the rows of q and k."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _write(path: Path, weights: dict[str, Floats], *, quantization: str = "F32", **changes: object) -> Path:
    writer = gguf_library.GGUFWriter(path, str(changes.get("architecture", "llama")))
    writer.add_block_count(1), writer.add_context_length(128), writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN), writer.add_head_count(HEADS), writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(50_000.0)
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    writer.add_token_list(TOKENS), writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_chat_template("{{ messages }}")
    names = {ours: theirs for theirs, ours in gguf._LAYER_NAMES.items()} | {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
    }
    for name, values in weights.items():
        short = names.get(name.removeprefix("model.layers.0."))
        stored = f"blk.0.{short}.weight" if ".layers." in name else f"{short}.weight"
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        data = _interleaved(values, heads) if heads else values
        kind = gguf_library.GGMLQuantizationType[
            quantization if data.ndim == 2 and "token_embd" not in stored else "F32"
        ]
        writer.add_tensor(stored, gguf_library.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return path


def _convert(source: Path, folder: Path) -> Path:
    folder.mkdir()
    gguf.convert(source, folder)
    return folder


@pytest.mark.parametrize(("quantization", "error"), [("F32", 0.01), ("Q8_0", 0.03), ("Q4_1", 0.3)])
def test_weights_come_back_under_their_names_and_in_their_rows(tmp_path: Path, quantization: str, error: float) -> None:
    weights = _weights()
    folder = _convert(_write(tmp_path / "a.gguf", weights, quantization=quantization), tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {f"{name}.weight" for name in weights}
    for name, values in weights.items():
        got = tensors[f"{name}.weight"]
        assert got.dtype is torch.bfloat16
        assert np.abs(got.float().numpy() - values).max() < error * max(1.0, np.abs(values).max() / 2), name


def test_the_folder_loads_and_says_what_the_file_said(tmp_path: Path) -> None:
    folder = _convert(_write(tmp_path / "a.gguf", _weights()), tmp_path / "out")
    config = load_model(folder, device="cpu").config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HIDDEN // HEADS)
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-5, 50_000.0, 128)
    assert config.tied_embeddings and config.eos_token_ids == (2,) and config.dtype == "bfloat16"


def test_the_tokenizer_splits_digits_and_knows_control_tokens(tmp_path: Path) -> None:
    folder = _convert(_write(tmp_path / "a.gguf", _weights()), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>ab 12<|im_end|>"
    assert tokenizer.encode(text).tokens == ["<|im_start|>", "ab", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gpt2"}, "general.architecture"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"quantization": "Q5_0"}, "Q5_0"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    source = _write(tmp_path / "a.gguf", _weights(), **changes)
    with pytest.raises(ModelError, match=named):
        _convert(source, tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"a\.gguf isn't a readable GGUF file"):
        _convert(tmp_path / "a.gguf", tmp_path / "out")
