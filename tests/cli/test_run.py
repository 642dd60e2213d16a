"""`flowinfer run`: the question that it can ask itself, and what it prints when a worker can't start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from flowinfer.cli.run import ask_chat, run
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan
from flowinfer.runtime.boot import Report
from flowinfer.runtime.supervisor import StartError, Supervisor

PLAN = Plan(name="test", digest="", file="pipe.yaml", stages={}, edges=(), workers={})


class FakeService(BaseHTTPRequestHandler):
    """Answers /v1/models and chats as a service does."""

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if chat["messages"][0]["content"] == "fail":
            self._reply({"error": {"message": "no room"}}, 429)
        else:
            self._reply({"choices": [{"message": {"content": f"{chat['model']} says hello"}}]})

    def _reply(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), FakeService)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_question_goes_to_the_served_model(address: str) -> None:
    assert ask_chat(address, "hello?") == "small says hello"


def test_a_refusal_is_told_in_the_services_words(address: str) -> None:
    with pytest.raises(FlowInferError, match="no room"):
        ask_chat(address, "fail")


def test_a_worker_that_cannot_start_ends_the_command_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Supervisor) -> None:
        raise StartError("decode.0", Report(error="stage 'decode' (pipe.yaml:3:5): no such model", help="Pull it."))

    monkeypatch.setattr("flowinfer.graph.load_plan", lambda *args: PLAN)
    monkeypatch.setattr(Supervisor, "run", fail)
    monkeypatch.setattr("flowinfer.runtime.keeper.keep", lambda serve: serve(None))  # in this process
    result = CliRunner().invoke(run, ["pipe.yaml"])
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "worker decode.0 couldn't start: stage 'decode' (pipe.yaml:3:5): no such model" in words
    assert "Pull it." in words


def test_the_ready_line_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.graph.load_plan", lambda *args: PLAN)
    monkeypatch.setattr(Supervisor, "run", lambda self: self._ready("http://127.0.0.1:8000"))
    monkeypatch.setattr("flowinfer.runtime.keeper.keep", lambda serve: serve(None))
    result = CliRunner().invoke(run, ["pipe.yaml"])
    assert result.exit_code == 0 and "test is ready at http://127.0.0.1:8000" in result.output
