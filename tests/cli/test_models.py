"""`flowinfer models` on a cache of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli.models import models
from flowinfer.engine import manifest
from flowinfer.errors import ModelError

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 3],
}


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds org/tiny."""
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "org--tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    manifest.write(folder, source="test")
    return folder


def _run(*args: str) -> str:
    result = CliRunner().invoke(models, args, catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    return result.output


def test_list_shows_what_is_there_and_what_can_be_had(pulled: Path) -> None:
    lines = _run("list").splitlines()
    assert any("org/tiny" in line and "Qwen3MoeForCausalLM" in line and "4k" in line for line in lines)
    assert any("smollm2-135m" in line and "not pulled yet" in line for line in lines)


def test_show_prints_sizes_of_a_name_or_a_folder(pulled: Path) -> None:
    assert _run("show", "org/tiny") == _run("show", str(pulled))
    assert "8, 2 a token" in _run("show", "org/tiny") and "2, 3" in _run("show", "org/tiny")


def test_pull_of_a_model_that_is_there_only_names_its_folder(pulled: Path) -> None:
    assert str(pulled) in _run("pull", "org/tiny", "--verify")


def test_an_unknown_model_is_an_error_that_helps(pulled: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        _run("show", "smollm2")


def test_show_tells_what_of_a_token_goes_to_disk() -> None:
    """Of a model with windows, a twelfth of what whole blocks would take, and more where somebody may go on."""
    out = _run("show", "flowinfer-mini")
    assert "192 B of a token, 168 KiB of each end" in out and "it would be 2272 B" in out
