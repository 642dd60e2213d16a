"""The two sides of a comparison, each a running graph that answers a group of requests and stamps every piece."""

from __future__ import annotations

import http.client
import json
import queue
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flowinfer.compare.asks import CHAT, Ask
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.graph.diff import compare
from flowinfer.graph.plan import Plan
from flowinfer.message import Piece
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.rewire import control
from flowinfer.runtime.rewire.protocol import Manner, Request
from flowinfer.runtime.stats import resident_bytes
from flowinfer.serve.gateway import GatewayConfig
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.job import Limits

TIMEOUT_S = 600.0
START_TIMEOUT_S = 300.0
_ADDRESS = re.compile(r"ready at http://[^:\s]+:(\d+)")


class Answer(msgspec.Struct):
    """One answer. asked and stamps in seconds of perf_counter; tokens is empty where only text can be had (HTTP)."""

    asked: float
    stamps: list[float] = []
    text: str = ""
    tokens: list[int] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ended: float = 0.0
    error: str = ""


class Arm(Protocol):
    """One side."""

    def answer(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        """Sends these requests, each as much after the first one as its `at` is, and waits for all answers."""

    def memory(self) -> int | None:
        """Bytes of resident memory that this side holds; None where it can't be told from the other's."""

    def close(self) -> None: ...


class Waits:
    """Lets requests go when their time has come, as counted from the first one."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._began, self._first = time.perf_counter(), asks[0].at

    def until(self, ask: Ask) -> None:
        """Sleeps until this one is due."""
        if (left := self._began + ask.at - self._first - time.perf_counter()) > 0:
            time.sleep(left)


class LocalArm:
    """The graph fused into a thread of this process. alone: nothing else is in it, so that its memory is the arm's."""

    def __init__(
        self, plan: Plan, opened: Callable[[LocalService], None] = lambda service: None, *, alone: bool = False
    ) -> None:
        self._plan, self._alone = plan, alone
        config = GatewayConfig.of(plan)
        self._model = config.models[0]
        self._limits = Limits.of(config)
        self._service = LocalService(plan)
        self._service.open()
        opened(self._service)
        self._service.start()

    def answer(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        answers, waits = [Answer(asked=0.0) for _ in asks], Waits(asks)
        for index, ask in enumerate(asks):
            waits.until(ask)
            self._submit(ask, salt, answers[index], partial(ended.put, index))
        for _ in asks:
            self._wait(ended)
        return answers

    def _submit(self, ask: Ask, salt: str, answer: Answer, done: Any) -> None:
        body, id = ask.with_model(self._model, salt), f"compare-{uuid.uuid4().hex}"
        answer.asked = time.perf_counter()
        try:
            job = chat_job(decode(ChatRequest, body), id, self._limits) if ask.path == CHAT else None
            job = job or completion_job(decode(CompletionRequest, body), id, self._limits)
            if len(job.calls) != 1:
                raise FlowInferError(f"request {ask.name} asks for {len(job.calls)} answers; compare takes one each.")
        except RequestError as error:
            answer.error, answer.ended = str(error), time.perf_counter()
            done()
            return
        self._service.submit(job.calls[0], lambda got: _take(answer, got, done))

    def _wait(self, ended: queue.SimpleQueue[int]) -> None:
        while True:
            try:
                ended.get(timeout=1.0)
                return
            except queue.Empty:
                if self._service.error is not None:
                    raise FlowInferError(f"The pipeline broke: {self._service.error}") from self._service.error

    def take(self, plan: Plan) -> str:
        """Runs this plan from now on if that needs no start: "live" or "warm", as `flowinfer plan` says; else ""."""
        diff = compare(self._plan, plan, LoadStage(Path(plan.file).parent, plan.allow_local))
        fits = all(change.kind == "live" or change.stages for change in diff.changes)
        if not fits or diff.kind not in ("live", "warm"):
            return ""
        self._service.change(plan)
        self._plan = plan
        return diff.kind

    def memory(self) -> int | None:
        return resident_bytes() if self._alone else None

    def close(self) -> None:
        self._service.close()


def _take(answer: Answer, got: Piece | RequestError, done: Any) -> None:
    now = time.perf_counter()
    if isinstance(got, RequestError):
        answer.error, answer.ended = str(got), now
        done()
        return
    if got.tokens or got.text:
        answer.stamps.append(now)
    answer.text += got.text
    answer.tokens += got.tokens
    if got.finish is not None:
        finish, answer.ended = got.finish, now
        answer.prompt_tokens, answer.completion_tokens = finish.prompt_tokens, finish.completion_tokens
        answer.cached_tokens = finish.cached_tokens
        answer.drafted_tokens, answer.accepted_tokens = finish.drafted_tokens, finish.accepted_tokens
        done()


class ServiceArm:
    """The graph as true processes: `flowinfer run` on a port that it chooses, asked over HTTP."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "flowinfer", "run", *arguments, "--set", "serve.port=0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: list[str] = []
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="compare-run").start()
        try:
            self._port = self._ready.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            self._port = 0
        if not self._port:
            self.close()
            raise FlowInferError(f"`flowinfer run {' '.join(arguments)}` didn't start:\n{''.join(self._lines[-20:])}")
        models = json.loads(self._get("/v1/models"))["data"]
        self._model = models[0]["id"] if models else "default"

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.append(line)
            if match := _ADDRESS.search(line):
                self._ready.put(int(match[1]))
        self._ready.put(0)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def answer(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        waits = Waits(asks)
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(lambda ask: self._one(ask, salt, waits), asks))

    def _one(self, ask: Ask, salt: str, waits: Waits) -> Answer:
        waits.until(ask)
        body = json.loads(ask.with_model(self._model, salt))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = Answer(asked=time.perf_counter())
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", ask.path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                answer.error = str(json.loads(response.read()).get("error", {}).get("message", response.status))
            for line in response if response.status == 200 else ():
                if line.startswith(b"data: {"):
                    _take_event(answer, json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        answer.ended = answer.ended or time.perf_counter()
        return answer

    def take(self, plan: Plan) -> str:
        """As LocalArm's, by the service's own machinery; replaced workers count as warm."""
        folder = next(folder for service, folder in control.running() if service.pid == self._process.pid)
        replies = [*control.ask(folder, Request(do="plan", plan=plan))]
        kinds = {change.kind for change in replies[-1].changes}
        if not replies[-1].ok or not kinds <= {"live", "warm"}:
            return ""
        *_, last = control.ask(folder, Request(do="apply", plan=plan, note="sweep", manner=Manner(probation_s=0.0)))
        return ("warm" if "warm" in kinds else "live") if last.ok else ""

    def memory(self) -> int:
        """Sum over the workers, from /metrics."""
        page = self._get("/metrics").decode()
        return int(
            sum(float(value) for value in re.findall(r"^flowinfer:worker_resident_bytes\{.*\} (\S+)", page, re.M))
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def _take_event(answer: Answer, event: dict[str, Any]) -> None:
    now = time.perf_counter()
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
    for choice in event.get("choices", ()):
        text = choice["text"] if "text" in choice else (choice["delta"].get("content") or "")
        if text:
            answer.stamps.append(now)
            answer.text += text
        if choice.get("finish_reason"):
            answer.ended = now
    if usage := event.get("usage"):
        drafts = usage["completion_tokens_details"]
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        answer.accepted_tokens = drafts["accepted_prediction_tokens"]
        answer.drafted_tokens = answer.accepted_tokens + drafts["rejected_prediction_tokens"]
