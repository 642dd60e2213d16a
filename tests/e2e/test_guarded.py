"""A service behind keys, limits, TLS and CORS, started by `flowinfer run` and asked by people's own clients."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from flowinfer.serve.access import digest_of

ROOT = Path(__file__).parents[2]
CERT = ROOT / "tests" / "serve" / "localhost.pem"
RATE = 40
ORIGIN = "https://chat.example.org"
STAGE = '''
from collections.abc import Iterable

from flowinfer.message import Call, Finish, Opened, Piece, Text
from flowinfer.stage import Stage


class Parrot(Stage):
    """Says what it hears; the answer to "wait" never ends."""

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            heard = call.messages[-1]["content"] if call.messages else str(call.prompt)
            piece = Piece(id=call.id, text=heard, tokens=[1], opened=Opened(prompt_tokens=3))
            if heard != "wait":
                piece.finish = Finish(reason="stop", prompt_tokens=3, completion_tokens=1)
            yield Text(step=0, pieces=[piece])
'''
PIPELINE = """flowinfer: 1
name: guarded
serve:
  port: PORT
  apis: [openai, anthropic]
  max_body: 64KiB
  keys: {ann: ANN, bob: BOB}
  key_requests: 3
  key_rate: RATE
  cors: ["ORIGIN"]
  tls: {cert: "CERT", key: "KEY"}
  state: {path: kept}
  drain_timeout: 200ms
stages:
  parrot: {use: "./parrot.py:Parrot"}
edges:
  api -> parrot:
  parrot -> api:
"""


class Guarded:
    """The service, over starts."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "parrot.py").write_text(STAGE)
        text = PIPELINE.replace("PORT", str(self.port)).replace("RATE", str(RATE)).replace("ORIGIN", ORIGIN)
        text = text.replace("ANN", digest_of("secret-a")).replace("BOB", digest_of("secret-b"))
        text = text.replace("CERT", str(CERT)).replace("KEY", str(CERT.with_suffix(".key")))
        (folder / "guarded.yaml").write_text(text)
        self._folder = folder
        self.url = f"https://localhost:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "flowinfer", "run", str(self._folder / "guarded.yaml"), "--allow-local"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if "is ready" in line:
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        raise AssertionError("".join(seen))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def openai(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(CERT))  # clients trust it
        service = Guarded(tmp_path_factory.mktemp("guarded"))
        yield service
    if service.process.poll() is None:
        service.process.terminate()
    service.process.wait(30)


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_both_clients_come_in_with_their_keys_and_nobody_without(guarded: Guarded) -> None:
    answer = guarded.openai("secret-a").chat.completions.create(model="guarded", messages=said("hello"))
    assert answer.choices[0].message.content == "hello"
    message = guarded.anthropic("secret-b").messages.create(model="guarded", messages=said("hello"), max_tokens=9)
    assert message.content[0].text == "hello"  # type: ignore[union-attr]
    with pytest.raises(openai.AuthenticationError):
        guarded.openai("other").models.list()
    with pytest.raises(anthropic.AuthenticationError):
        guarded.anthropic("other").messages.create(model="guarded", messages=said("hello"), max_tokens=9)
    with guarded.http() as http:
        trace = "/admin/trace/x"
        assert [http.get(path).status_code for path in ("/health", "/ready", "/v1/models", trace)] == [
            200,
            200,
            401,
            401,
        ]
        assert http.get(trace, headers={"authorization": "Bearer secret-a"}).status_code == 200


def test_tenants_see_neither_responses_nor_files_of_each_other(guarded: Guarded) -> None:
    ann, bob = guarded.openai("secret-a"), guarded.openai("secret-b")
    made = ann.responses.create(model="guarded", input="mine")
    file = ann.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    for attempt in (lambda: bob.responses.retrieve(made.id), lambda: bob.files.content(file.id)):
        with pytest.raises(openai.NotFoundError):
            attempt()


def test_a_key_has_only_its_share_of_open_requests(guarded: Guarded) -> None:
    ann = guarded.openai("secret-a")
    open_streams = []
    for _ in range(3):
        stream = ann.chat.completions.create(model="guarded", messages=said("wait"), stream=True)
        open_streams.append(stream)
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        ann.chat.completions.create(model="guarded", messages=said("hello"))
    assert caught.value.code == "too_many_requests"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    answer = guarded.openai("secret-b").chat.completions.create(model="guarded", messages=said("hello"))
    assert answer.choices[0].message.content == "hello"
    for stream in open_streams:
        stream.close()


def test_too_much_is_refused_before_it_is_read(guarded: Guarded) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        guarded.openai("secret-a").chat.completions.create(model="guarded", messages=said("x" * 100_000))
    assert caught.value.status_code == 413
    with guarded.http() as http:
        assert http.get("/health", headers={"x-big": "x" * 1_000_000}).status_code == 431


def test_pages_of_the_named_origin_may_ask(guarded: Guarded) -> None:
    with guarded.http() as http:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        allowed = http.options("/v1/chat/completions", headers={"origin": ORIGIN, **ask})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert (
            http.options("/v1/chat/completions", headers={"origin": "https://evil.example", **ask}).status_code == 400
        )


def test_what_is_kept_outlives_a_restart_and_a_batch_goes_on(guarded: Guarded) -> None:
    bob = guarded.openai("secret-b")
    made = bob.responses.create(model="guarded", input="remember me")
    body = {"model": "guarded", "messages": said("done")}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    waits = {**line, "custom_id": "b", "body": {**body, "messages": said("wait")}}
    lines = "\n".join(map(json.dumps, (line, waits))).encode()
    file = bob.files.create(file=("in.jsonl", lines), purpose="batch")
    batch = bob.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until(lambda: bob.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
    guarded.stop()
    yaml = guarded._folder / "guarded.yaml"
    yaml.write_text(yaml.read_text().replace("parrot.py:Parrot", "parrot.py:Patient"))
    (guarded._folder / "parrot.py").write_text(STAGE.replace("Parrot", "Patient").replace('heard != "wait"', "True"))
    guarded.start()
    bob = guarded.openai("secret-b")
    assert bob.responses.retrieve(made.id).output_text == "remember me"
    until(lambda: bob.batches.retrieve(batch.id).status == "completed")
    output = bob.files.content(bob.batches.retrieve(batch.id).output_file_id or "").text
    assert sorted(json.loads(row)["custom_id"] for row in output.splitlines()) == ["a", "b"]


def test_a_rate_is_a_minutes_worth(guarded: Guarded) -> None:
    ann = guarded.openai("secret-a")
    with pytest.raises(openai.RateLimitError, match="a minute"):
        for _ in range(RATE + 1):
            ann.chat.completions.create(model="guarded", messages=said("x"))


def until(check: Any) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)
