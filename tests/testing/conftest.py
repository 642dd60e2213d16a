"""A pipeline of plain stages in three workers, a recording of it, and a way to run test files beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.testing import Outcome, run_inline

STAGES = '''
from collections.abc import Collection, Iterable
import numpy as np
from flowinfer.message import Call, Finish, Piece, Prompt, Text
from flowinfer.stage import Stage, StageConfig

class Split(Stage):
    """Characters as token ids, in the background, as a tokenizer does."""

    def step(self, calls: list[Call]) -> Iterable[Prompt]:
        for call in calls:
            done = lambda ids, call=call: [self.prompt(call, ids)]
            self.ctx.submit(lambda call=call: [ord(c) for c in call.prompt], done)
        return []

    def prompt(self, call: Call, ids: list[int]) -> Prompt:
        return Prompt(id=call.id, tokens=np.array(ids, np.int32), sampling=call.sampling)

class Reverse(Stage):
    """Turns each prompt around, in place."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        for prompt in prompts:
            prompt.tokens = prompt.tokens[::-1].copy()
            yield prompt

class Join(Stage):
    """Says a character every 100 ms."""

    class Config(StageConfig):
        mark: str = ""

    def open(self) -> None:
        self.left: dict[str, list[str]] = {}

    def step(self, prompts: list[Prompt]) -> Iterable[Text]:
        for prompt in prompts:
            self.left[prompt.id] = [chr(t) for t in prompt.tokens]
            self.later(prompt.id)
        return []

    def later(self, id: str) -> None:
        self.ctx.call_at(self.ctx.clock.now() + 0.1, lambda: self.say(id), request=id)

    def say(self, id: str) -> Iterable[Text]:
        chars = self.left.get(id)
        if chars is None:
            return []
        piece = Piece(id=id, text=chars.pop(0) + self.config.mark)
        if chars:
            self.later(id)
        else:
            del self.left[id]
            piece.finish = Finish(reason="stop")
        return [Text(step=0, pieces=[piece])]

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            self.left.pop(request, None)
'''
PIPELINE = """flowinfer: 1
name: plain
serve: {request_timeout: 30s}
workers: {middle: {device: cpu}, back: {device: cpu}}
stages:
  split: {use: "./stages.py:Split"}
  reverse: {use: "./stages.py:Reverse", place: {worker: middle}}
  join: {use: "./stages.py:Join", place: {worker: back}}
edges:
  api -> split:
  split -> reverse:
  reverse -> join:
  join -> api:
"""

RunFile = Callable[[str], dict[str, Outcome]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "plain.yaml").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunFile:
    """Runs the text of a test file; its outcomes by name."""

    def begin(text: str) -> dict[str, Outcome]:
        file = folder / "plain_test.yaml"
        file.write_text(f"pipeline: plain.yaml\nallow_local: true\n{text}")
        return {outcome.name: outcome for outcome in run_inline(file)}

    return begin


@pytest.fixture
def recording(folder: Path) -> Path:
    """The answers to abc, de and f."""
    asks, out = folder / "asks.jsonl", folder / "x.flow"
    asks.write_text(
        '{"prompt": "abc", "max_tokens": 16}\n{"prompt": "de", "max_tokens": 16}\n{"prompt": "f", "max_tokens": 16}\n'
    )
    done = CliRunner().invoke(
        main, ["record", str(folder / "plain.yaml"), "-o", str(out), "--on", str(asks), "--allow-local"]
    )
    assert done.exit_code == 0, done.output
    return out
