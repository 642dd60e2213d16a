"""A pipeline of one stage that echoes, so that commands run without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

ECHO = '''
from collections.abc import Iterable
import time

from flowinfer.errors import RequestError
from flowinfer.message import Call, Finish, Piece, Text
from flowinfer.stage import Stage, StageConfig


class Echo(Stage):
    """Says again what was said last, a word a step; DELAY seconds a step. "never" isn't answered, "fail" fails."""

    class Config(StageConfig):
        delay: float = 0.0

    def open(self) -> None:
        self.left: dict[str, list[str]] = {}
        self.cancelled: list[str] = []

    @property
    def busy(self) -> bool:
        return any(words != ["never"] for words in self.left.values())

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            text = call.messages[-1]["content"] if call.messages else str(call.prompt)
            if text == "fail":
                self.ctx.fail(call.id, RequestError(400, "asked to fail", code="asked"))
            elif text == "system":
                self.left[call.id] = [m["content"] for m in call.messages]
            else:
                self.left[call.id] = text.split()
        pieces = [self.say(id) for id, words in list(self.left.items()) if words != ["never"]]
        if pieces:
            time.sleep(self.config.delay)
            yield Text(step=0, pieces=pieces)

    def say(self, id: str) -> Piece:
        words = self.left[id]
        if words:
            return Piece(id=id, text=words.pop(0) + " ", tokens=[1])
        del self.left[id]
        return Piece(id=id, finish=Finish(reason="stop", prompt_tokens=1, completion_tokens=1))

    def cancel(self, requests) -> None:
        for id in requests:
            self.left.pop(id, None)
'''

PIPELINE = """flowinfer: 1
name: echo
serve: {port: 8000}
stages:
  echo: {use: "./echo.py:Echo", with: {delay: 0.0}}
edges:
  api -> echo:
  echo -> api:
"""


@pytest.fixture
def echo_file(tmp_path: Path) -> Path:
    """A pipeline file; it needs --allow-local."""
    (tmp_path / "echo.py").write_text(ECHO)
    file = tmp_path / "echo.yaml"
    file.write_text(PIPELINE)
    return file
