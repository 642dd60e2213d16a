"""`flowinfer top` against a server that only has /metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.service_url import running_url
from flowinfer.observe.exposition import render
from flowinfer.runtime.rewire.protocol import Service


class Page(BaseHTTPRequestHandler):
    """Each reading finds a hundred tokens more."""

    asked: list[str] = []  # noqa: RUF012 - what was asked for, of all handlers

    def do_GET(self) -> None:
        self.asked.append(self.path)
        samples = [
            ("flowinfer:worker_up", {"worker": "front.0"}, 1.0),
            ("flowinfer:stage_busy_seconds_total", {"stage": "decode"}, 0.1 * len(self.asked)),
            ("flowinfer:generation_tokens_total", {}, 100.0 * len(self.asked)),
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(render({"front.0": samples}))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    Page.asked.clear()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_once_prints_a_table_and_reads_only_metrics(url: str) -> None:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["top", "--url", url, "--once", "--interval", "0.2"])
    assert result.exit_code == 0, result.output
    assert "decode" in result.output and "front.0" in result.output
    assert Page.asked == ["/metrics", "/metrics"]


def test_json_for_scripts(url: str) -> None:
    result = CliRunner().invoke(main, ["top", "--url", url, "--once", "--json", "--interval", "0.2"])
    snapshot = json.loads(result.output)
    assert snapshot["tokens"] == pytest.approx(100 / snapshot["seconds"])


def test_nobody_there() -> None:
    result = CliRunner().invoke(main, ["top", "--url", "127.0.0.1:9", "--once"])
    assert result.exit_code == 1
    assert "No service answers at http://127.0.0.1:9" in result.output


def test_the_service_that_runs_here_is_meant(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [(Service(name="prod", pid=1, address=f"http://{url}"), Path())]
    monkeypatch.setattr("flowinfer.runtime.rewire.control.running", lambda: here)
    result = CliRunner().invoke(main, ["top", "--once", "--json", "--interval", "0.2"])
    assert result.exit_code == 0, result.output
    here.append((Service(name="other", pid=2, address="http://127.0.0.1:9"), Path()))
    assert running_url() == "http://127.0.0.1:8000"
