"""Which head belongs to which model is told by the file's header, and a head that doesn't suit is refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from decode_loop import save_random_llama

from flowinfer.engine import heads, hub, sources
from flowinfer.engine.draft import DraftHead, HeadConfig
from flowinfer.engine.models import load_model
from flowinfer.errors import ModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, 96, 128)
    return folder


def save(file: Path, model: Path, **changes: Any) -> Path:
    sizes = {"hidden_size": 48, "vocab_size": 96, "feature_layers": (0, 1), "num_heads": 2, "num_kv_heads": 1}
    config = HeadConfig(
        target="toy", digest=hub.describe(model).digest, ffn_size=16, head_dim=16, **{**sizes, **changes}
    )
    embed = torch.zeros(config.vocab_size, config.hidden_size)
    DraftHead.random(config, embed, embed, "cpu", torch.float32).save(file)
    return file


def test_the_header_says_what_the_head_is(model: Path, tmp_path: Path) -> None:
    info = heads.read(save(tmp_path / "head.safetensors", model, block=3))
    assert (info.target, info.block, info.vocab_size, info.feature_layers) == ("toy", 3, 96, (0, 1))
    assert info.num_params > 96 * 32


def test_a_head_that_suits_has_no_misfit(model: Path, tmp_path: Path) -> None:
    assert heads.misfit(str(model), str(save(tmp_path / "head.safetensors", model))) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 32}, "hidden_size 32, the model 48"),
        ({"vocab_size": 97}, "vocab_size 97, the model 96"),
        ({"feature_layers": (5,)}, "layer 5, the model has 2"),
    ],
)
def test_a_head_of_another_model_is_refused_by_what_differs(
    model: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    file = save(tmp_path / "head.safetensors", model, **changes)
    problem = heads.misfit(str(model), str(file))
    assert problem and named in problem.message and "draft: ngram" in problem.help


def test_a_head_trained_beside_other_weights_drafts_too_and_says_so(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    save(folder / "draft.safetensors", model)
    assert "other weights" not in heads.describe(str(folder))
    rewrite(folder / "draft.safetensors", digest="0123456789abcdef")
    assert heads.misfit(str(folder), "") is None
    assert "other weights" in heads.describe(str(folder))


def rewrite(file: Path, **changes: Any) -> None:
    """Changes fields of the header, of equal length."""
    data = file.read_bytes()
    old = heads.read(file)
    for name, value in changes.items():
        data = data.replace(getattr(old, name).encode(), value.encode())
    file.write_bytes(data)


@pytest.mark.parametrize("content", [b"", b"\x05\x00\x00\x00\x00\x00\x00\x00hello", b"\xff" * 20])
def test_a_file_that_is_no_head_is_refused(model: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "head.safetensors"
    file.write_bytes(content)
    problem = heads.misfit(str(model), str(file))
    assert problem and str(file) in problem.message


def test_weights_of_a_model_are_no_head(model: Path) -> None:
    with pytest.raises(ModelError, match="no draft head"):
        heads.read(model / "model.safetensors")


def test_a_model_without_a_head_says_what_would_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = heads.misfit(str(model), "")
    assert problem and "draft: ngram" in problem.help and "head: PATH" in problem.help


def test_a_head_in_the_models_folder_is_found_and_changes_nothing_of_the_model(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    digest = hub.describe(folder).digest
    save(folder / "draft.safetensors", model)
    assert heads.find(str(folder), "") == folder / "draft.safetensors"
    assert hub.describe(folder).digest == digest
    load_model(folder, dtype="float32")  # its tensors aren't taken for the model's


def test_a_head_is_described_for_people(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert heads.describe(str(folder)).startswith("none")
    save(folder / "draft.safetensors", model, block=4)
    assert heads.describe(str(folder)).startswith("4 tokens a pass") and "layers 0, 1" in heads.describe(str(folder))
    save(folder / "draft.safetensors", model, hidden_size=32)
    assert "hidden_size 32" in heads.describe(str(folder))


def test_heads_that_ship_suit_their_models() -> None:
    for name, path in sources.HEADS.items():
        if path.is_file():
            assert heads.misfit(name, "") is None
            assert msgspec.structs.asdict(heads.read(path))["block"] == 5


def test_the_check_imports_no_torch(model: Path, tmp_path: Path) -> None:
    file = save(tmp_path / "head.safetensors", model)
    code = (
        f"import sys; from flowinfer.engine import heads; assert heads.misfit({str(model)!r}, {str(file)!r}) is None;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
