"""The official JavaScript clients of both APIs. They need node, and `npm ci` in tests/js; .ci/run sees to both."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flowinfer.message import Call, Cancel, Event, Failure, Finish, Piece

FOLDER = Path(__file__).parents[1] / "js"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
SCRIPT = {"tool": CALL, "think": "<think>Hm.</think>Hello there."}


def node() -> str:
    """The program; skips the test, with the reason, where it or the clients aren't there."""
    found = shutil.which("node")
    why = "node isn't installed" if found is None else "the clients aren't installed: run `npm ci` in tests/js"
    if found is None or not (FOLDER / "node_modules" / "openai").exists():
        assert not os.environ.get("CI"), f"{why}, which .ci/run does"
        pytest.skip(why)
    return found


def test_both_javascript_clients_find_what_they_know(start: Any, play: Any) -> None:
    seen: list[Call] = []

    def answer(call: Call) -> Iterable[Piece | Event]:
        seen.append(call)
        asked = call.messages[-1]["content"] if call.messages else str(call.prompt)
        if asked == "endless":
            return [Piece(id=call.id, text="on and ", tokens=[1])]
        if asked == "break":
            return [Piece(id=call.id, text="Hel", tokens=[1]), Failure(id=call.id, message="It went wrong.")]
        end = Finish(reason="stop", prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
        return list(play(SCRIPT.get(asked, "Hello there."), finish=end)(call))

    service = start(answer, apis=("openai", "anthropic"), tools=True)
    done = subprocess.run(
        [node(), "suite.mjs", service.url], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 12
    aborted = [call.id for call in seen if call.messages and call.messages[-1]["content"] == "endless"]
    assert len(aborted) == 3
    for id in aborted:
        service.wait_sent(Cancel, id)
