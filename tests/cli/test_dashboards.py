"""`flowinfer dashboards` writes, checks and pushes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.observe import grafana
from flowinfer.observe.catalog import CATALOG


class FakeGrafana(BaseHTTPRequestHandler):
    seen: list[tuple[str, str, Any]]
    status = 200

    def do_GET(self) -> None:
        self._answer({"version": "11.2.0", "database": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).seen.append((self.path, self.headers.get("authorization", ""), json.loads(body)))
        self._answer({"status": "success", "uid": "flowinfer", "url": "/d/flowinfer/x", "message": "no"})

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(self.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[tuple[str, type[FakeGrafana]]]:
    handler = type("Handler", (FakeGrafana,), {"seen": [], "status": 200})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def run(*args: str) -> Any:
    return CliRunner().invoke(main, ["dashboards", *args])


def test_build_writes_what_check_accepts(tmp_path: Path) -> None:
    file = str(tmp_path / "new" / "d.json")
    assert run("build", "--check", "-o", file).exit_code == 1
    assert run("build", "-o", file).exit_code == 0
    assert run("build", "--check", "-o", file).exit_code == 0
    Path(file).write_text("{}")
    assert run("build", "--check", "-o", file).exit_code == 1


def test_the_table_names_every_metric() -> None:
    table = run("metrics").output
    assert all(f"`{metric.full_name}`" in table for metric in CATALOG)


def test_push_replaces_the_dashboard(fake: tuple[str, type[FakeGrafana]]) -> None:
    url, handler = fake
    result = run("push", "--url", url, "--token", "secret", "--folder", "llm")
    assert result.exit_code == 0, result.output
    assert "/d/flowinfer/x" in result.output
    ((path, authorization, body),) = handler.seen
    assert path == "/api/dashboards/db"
    assert authorization == "Bearer secret"
    assert body["overwrite"] is True
    assert body["folderUid"] == "llm"
    assert body["dashboard"]["panels"] == grafana.dashboard()["panels"]


def test_push_says_why_it_failed(fake: tuple[str, type[FakeGrafana]]) -> None:
    url, handler = fake
    handler.status = 401
    result = run("push", "--url", url)
    assert result.exit_code == 1
    assert "refused" in result.output
    assert "Traceback" not in result.output


def test_push_without_a_grafana_fails_plainly() -> None:
    result = run("push", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
