"""Weights come the same by a mapping and by a card's reader; on a CPU the reader's threads fill ordinary memory.

With FLOWINFER_TEST_DEVICE=cuda:0 the same tests run through pinned memory and streams.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_load import bytes_of, write_checkpoint
from safetensors.torch import save_file

from flowinfer.engine import card_reader
from flowinfer.engine.card_reader import CardReader
from flowinfer.engine.formats import read_tensors
from flowinfer.engine.models import load_model
from flowinfer.engine.weights import Weights
from flowinfer.errors import ModelError

DEVICE = torch.device(os.environ.get("FLOWINFER_TEST_DEVICE", "cpu"))
STORED = {
    "wide.weight": torch.randn(37, 65),
    "half.weight": torch.randn(5, 1001).bfloat16(),
    "small.weight": torch.randn(3),
    "codes": torch.randint(-128, 127, (9, 7), dtype=torch.int8),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(STORED, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def weights(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weights]:
    monkeypatch.setattr(card_reader, "MAPPED", request.param)
    with Weights(folder, dtype=torch.float32, device=DEVICE) as opened:
        opened._reader = CardReader(DEVICE, threads=3, chunk=512)  # many chunks a tensor
        yield opened


@pytest.mark.parametrize("name", ["wide.weight", "half.weight", "small.weight"])
def test_a_tensor_has_the_bytes_of_the_file_wherever_it_is_put(weights: Weights, name: str) -> None:
    wanted = STORED[name].float()
    assert torch.equal(weights.take(name, tuple(wanted.shape)).cpu(), wanted)
    room = torch.full((len(wanted) + 2, *wanted.shape[1:]), 7.0, device=DEVICE)
    weights.take(name, tuple(wanted.shape), out=room[1:-1])
    weights.settle()
    assert torch.equal(room[1:-1].cpu(), wanted)
    assert (room[[0, -1]] == 7).all()


def test_numbers_stay_as_they_are_stored_where_that_is_asked_for(weights: Weights) -> None:
    assert all(torch.equal(weights.moved(name).cpu(), stored) for name, stored in STORED.items())
    weights.finish()


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("none.weight", (3,), "is missing"), ("wide.weight", (65, 37), "has shape"), ("codes", (9, 7), "stored as I8")],
)
def test_what_does_not_fit_is_named(weights: Weights, name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.*{said}"):
        weights.take(name, shape)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_ends_too_early_is_named(mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_reader, "MAPPED", mapped)
    file = tmp_path / "short"
    file.write_bytes(bytes(1000))
    reader, out = CardReader(DEVICE, threads=2, chunk=256), torch.empty(300, device=DEVICE)
    reader.read(file, 0, out)
    with pytest.raises(ModelError, match="short can't be read"):
        reader.settle()
    reader.close()


SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with what a CPU maps")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_read_by_threads_is_the_one_that_is_mapped(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    size = write_checkpoint(str(tmp_path), tmp_path)
    assert size == sum(bytes_of(shape) for shape in shapes(tmp_path)) > 2 * 40 * 32
    mapped = load_model(tmp_path, dtype=dtype)
    monkeypatch.setattr(Weights, "__enter__", by_threads)
    read = load_model(tmp_path, dtype=dtype)
    for ours, theirs in zip(read._layers, mapped._layers, strict=True):
        x = torch.eye(32, dtype=mapped.dtype)
        assert torch.equal(ours.qkv(x), theirs.qkv(x)) and torch.equal(ours.ffn(x), theirs.ffn(x))
        assert torch.equal(ours.input_norm_H, theirs.input_norm_H)
    assert torch.equal(read._embed_VH, mapped._embed_VH)


def shapes(folder: Path) -> list[tuple[int, ...]]:
    return [info.shape for info in read_tensors(folder).values()]


def by_threads(weights: Weights) -> Weights:
    weights._reader = CardReader(weights.device, threads=4, chunk=1000)
    return weights
