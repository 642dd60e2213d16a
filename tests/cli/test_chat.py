"""`flowinfer chat` talks to a pipeline in the process or to a running service."""

from __future__ import annotations

import builtins
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from flowinfer.cli import main
from flowinfer.cli.chat import Conversation
from flowinfer.cli.conversation import LocalPartner, Options, RemotePartner
from flowinfer.errors import FlowInferError
from flowinfer.graph import load_plan


def talk(*args: str, input: str) -> Any:
    return CliRunner().invoke(main, ["chat", *args], input=input)


def test_a_turn_a_line_comes_from_a_pipe(echo_file: Path) -> None:
    result = talk(str(echo_file), "--allow-local", input="hello you\n\nbye\n")
    assert result.exit_code == 0, result.output
    assert result.output.split("\n") == ["hello you ", "bye ", ""]


def test_commands_set_the_system_prompt_and_forget(echo_file: Path) -> None:
    script = "one\n/system be brief\nsystem\n/reset\nsystem\n/quit\nnever said\n"
    result = talk(str(echo_file), "--allow-local", input=script)
    assert result.output.split("\n") == ["one ", "be brief one one  system ", "be brief system ", ""]


def test_a_failed_answer_is_told_and_the_talk_goes_on(echo_file: Path) -> None:
    result = talk(str(echo_file), "--allow-local", input="fail\nhello\n")
    assert "asked to fail" in result.output
    assert "hello " in result.output
    assert result.exit_code == 1


def test_closing_an_answer_cancels_it(echo_file: Path) -> None:
    plan = load_plan(echo_file, allow_local=True)
    partner = LocalPartner(plan, Options())
    answer = partner.answer([{"role": "user", "content": "a b c d e f"}])
    assert next(answer) == "a "
    answer.close()
    assert "".join(partner.answer([{"role": "user", "content": "next"}])) == "next "
    partner.close()


class Interrupted:
    """A partner whose user presses Ctrl-C after the first word."""

    model = "m"

    def __init__(self) -> None:
        self.closed = False
        self.heard: list[Any] = []

    def answer(self, messages: Any) -> Iterator[str]:
        self.heard.append([message["content"] for message in messages])
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            self.closed = True

    def close(self) -> None: ...


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    partner, lines = Interrupted(), iter(["one", "two"])
    console = Console(file=io.StringIO())
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    assert Conversation(partner, console, "", interactive=True).run() is False
    assert partner.closed
    assert partner.heard == [["one"], ["one", "half", "two"]]


# -------------------------------------------------------------------------------------------------------------- remote


class FakeService(BaseHTTPRequestHandler):
    asked: list[Any]
    events: list[str]

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked.append(body)
        if body["messages"][-1]["content"] == "refuse":
            self._send(b'{"error": {"message": "no such thing"}}', 400)
        else:
            self._send("".join(f"data: {event}\n\n" for event in self.events).encode())

    def log_message(self, *args: Any) -> None: ...

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


@pytest.fixture
def remote() -> Iterator[tuple[str, type[FakeService]]]:
    handler = type("Handler", (FakeService,), {"asked": [], "events": [delta("hé "), delta("you"), "[DONE]"]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_a_running_service_is_asked_for_its_first_model(remote: tuple[str, type[FakeService]]) -> None:
    url, handler = remote
    result = talk("--url", url, "--max-tokens", "5", "--system", "be brief", input="hi\nagain\n")
    assert result.output == "hé you\nhé you\n"
    assert handler.asked[0]["model"] == "tiny"
    assert handler.asked[0]["max_tokens"] == 5
    assert "temperature" not in handler.asked[0]
    assert [message["content"] for message in handler.asked[1]["messages"]] == ["be brief", "hi", "hé you", "again"]


def test_a_refusal_is_told(remote: tuple[str, type[FakeService]]) -> None:
    result = talk("--url", remote[0], input="refuse\n")
    assert "no such thing" in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize("events", [[delta("half"), json.dumps({"error": {"message": "it broke"}})], [delta("half")]])
def test_an_answer_that_breaks_off_is_no_answer(remote: tuple[str, type[FakeService]], events: list[str]) -> None:
    url, handler = remote
    handler.events = events
    with pytest.raises(FlowInferError, match="broke"):
        list(RemotePartner(url, None, Options()).answer([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "http://"])
def test_no_service_is_told_plainly(url: str) -> None:
    result = talk("--url", url, input="hi\n")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "help" in result.output
