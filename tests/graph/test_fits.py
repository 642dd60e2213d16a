"""Settings that must suit the model of another stage, and what a check says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.engine import heads
from flowinfer.engine.sources import BUNDLED
from flowinfer.graph.checker import check
from flowinfer.spec import load

FILE = Path(__file__).parent / "bad" / "head.yaml"


def write_head(file: Path, **changes: Any) -> Path:
    """A head's header for flowinfer-mini, with nothing behind it."""
    from flowinfer.engine import hub

    info = hub.describe(BUNDLED["flowinfer-mini"])
    said = {
        "target": "flowinfer-mini",
        "hidden_size": info.config.hidden_size,
        "vocab_size": info.config.vocab_size,
        "feature_layers": [1, 2],
        "block": 5,
        "digest": info.digest,
        **changes,
    }
    header = msgspec.json.encode({"__metadata__": {heads.METADATA: msgspec.json.encode(said).decode()}})
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return file


def problems(head: Path, *sets: str) -> list[tuple[str, str, str]]:
    given = [f"vars.model=flowinfer-mini", f"stages.verify.with.head={head}", *sets]  # noqa: F541
    found = check(load(FILE, sets=given)).problems
    return [(problem.code, problem.message, problem.help) for problem in found]


def test_a_head_that_suits_is_right(tmp_path: Path) -> None:
    assert problems(write_head(tmp_path / "head.safetensors"), "stages.verify.with.tokens=5") == []


def test_more_tokens_than_the_heads_block_are_refused_and_both_are_named(tmp_path: Path) -> None:
    ((code, message, help),) = problems(write_head(tmp_path / "head.safetensors"), "stages.verify.with.tokens=8")
    assert code == "FI325" and "tokens: 8" in message and "5 tokens" in message
    assert "tokens: 5" in help


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head.safetensors", target="other", hidden_size=1024)
    ((code, message, _),) = problems(head, "stages.verify.with.tokens=8")
    assert code == "FI325" and "other" in message and "1024" in message


def test_a_model_without_a_head_is_told_what_would_do() -> None:
    ((code, message, help),) = problems(Path(), "vars.model=org/name", "stages.verify.with.head=")
    assert code == "FI325" and "org/name" in message
    assert "--set stages.verify.with.draft=ngram" in help


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowinfer.engine.models.named import write_random

    other = write_random("smollm2-135m", tmp_path / "other")
    sets = ("stages.verify.with.draft=model", f"stages.verify.with.draft_model={other}")
    ((code, message, _),) = problems(tmp_path / "unused", *sets)
    assert code == "FI325" and "49152" in message and "flowinfer-mini" in message


def test_a_draft_model_must_be_named(tmp_path: Path) -> None:
    found = problems(tmp_path / "unused", "stages.verify.with.draft=model")
    assert [code for code, _, _ in found] and "draft_model" in found[0][1]


@pytest.mark.parametrize(
    ("draft", "device", "said"),
    [("suffix", "cuda:0", True), ("ngram", "cuda:0", False), ("none", "cuda:0", False), ("suffix", "cpu", False)],
)
def test_check_says_that_drafts_of_the_host_keep_steps_on_a_gpu_from_running_ahead(
    draft: str, device: str, said: bool
) -> None:
    sets = [f"--set=stages.verify.with.draft={draft}", f"--set=workers.engine.device={device}"]
    result = CliRunner().invoke(main, ["check", str(FILE), *sets])
    assert result.exit_code == 0, result.output
    assert ("don't run ahead" in result.output) == said
