"""Tests beside pipelines: cases that must be answered as another pipeline answers them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.errors import FlowInferError
from flowinfer.testing import PipelineTest, run_inline

PACKAGE = """
from collections.abc import Iterable
from flowinfer.message import Call, Finish, Piece, Text
from flowinfer.stage import Stage, StageConfig

class Say(Stage):
    class Config(StageConfig):
        shout: bool = False

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            text = call.prompt.upper() if self.config.shout else call.prompt
            yield Text(step=1, pieces=[Piece(id=call.id, text=text, finish=Finish(reason="stop"))])
"""
PIPELINE = (
    "flowinfer: 1\nstages:\n  say: {{use: say, with: {{shout: {shout}}}}}\nedges:\n  api -> say:\n  say -> api:\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pipelines of one stage, which an installed package is made to offer."""
    (tmp_path / "say_for_tests.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("flowinfer.spec.registry._entry_points", lambda: (("say", "say_for_tests:Say"),))
    for name, shout in (("plain", "false"), ("loud", "true")):
        (tmp_path / f"{name}.yaml").write_text(PIPELINE.format(shout=shout))
    return tmp_path


def write(folder: Path, text: str) -> Path:
    file = folder / "loud_test.yaml"
    file.write_text(text)
    return file


def test_an_equivalent_pipeline_must_answer_the_same(folder: Path) -> None:
    cases = "cases:\n  - {name: same, prompt: ABC}\n  - {name: other, prompt: abc}\n"
    same, other = run_inline(write(folder, f"pipeline: loud.yaml\nequivalent_to: plain.yaml\n{cases}"))
    assert same.problems == ()
    assert other.problems == ("answers 'ABC', but plain.yaml answers 'abc'",)


def test_expectations_are_held_too(folder: Path) -> None:
    case = "cases:\n  - {name: a, prompt: ABC, expect: {text: abc}}\n"
    (outcome,) = run_inline(write(folder, f"pipeline: loud.yaml\nequivalent_to: plain.yaml\n{case}"))
    assert outcome.problems == ("text is 'ABC', expected 'abc'",)


def test_a_case_that_cannot_fail_is_refused(folder: Path) -> None:
    file = write(folder, "pipeline: loud.yaml\ncases:\n  - {name: idle, prompt: a}\n")
    with pytest.raises(FlowInferError, match="'idle' expects nothing"):
        PipelineTest.load(file)
