"""Runs a test file over true processes: real workers, real sockets, a real kill -9, requests over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.observe.reading import Reading, parse
from flowinfer.serve.gateway import GatewayConfig
from flowinfer.testing.checks import Passed, Result, Run
from flowinfer.testing.file import Case
from flowinfer.testing.inline import restarts
from flowinfer.testing.inside import EDGES, ENV, GO, NAMES, ORDERS, RESULTS, Orders, all_armed
from flowinfer.testing.plain import ask_http
from flowinfer.testing.prepared import Prepared
from flowinfer.testing.serve import PLAN

START_S = 300.0  # loading a model on a busy machine
BACK_S = 120.0  # for a killed worker to be ready again
LOOK_S = 0.1


class RealRun:
    """One run of a prepared test as a service of its own, with a home of its own for what it writes."""

    def __init__(self, ready: Prepared, path: Path) -> None:
        self.ready, self.path = ready, path
        self.test = ready.test
        self.is_cut = ready.test.cut is not None
        if self.is_cut and self.test.expect is not None and (self.test.expect.metrics or self.test.expect.restarts):
            help = "Run it without --real, or leave metrics and restarts out."
            raise FlowInferError(f"{path}: a cut serves no metrics over HTTP.", help=help)
        self.results = {case.name: Result(case.name) for case in ready.cases}

    def run(self) -> Run:
        """Starts the service, sends the cases, waits for their ends, stops it. Raises FlowInferError for no start."""
        with tempfile.TemporaryDirectory(prefix="fi-test-") as name:
            self.folder = Path(name)
            self._write_orders()
            with self._service() as address:
                self.address = address
                if not self.is_cut:
                    await_open(address)
                before = self._metrics()
                self._go()
                self._cases()
                after = self._settled()
            return self._run(before, after)

    # -- the service ---------------------------------------------------------------------------------------------------

    def _write_orders(self) -> None:
        serve = msgspec.structs.replace(self.ready.plan.serve, port=0)
        plan = msgspec.structs.replace(self.ready.plan, serve=serve)
        (self.folder / PLAN).write_bytes(msgspec.json.encode(plan))
        edges = {name: edge.where or "" for name, edge in self.test.expect.edges.items()} if self.test.expect else {}
        faults = [fault.model_dump(mode="json", by_alias=True, exclude_none=True) for fault in self.test.faults]
        orders = Orders(test=str(self.path.resolve()), edges=edges, faults=faults)
        (self.folder / ORDERS).write_bytes(msgspec.json.encode(orders))

    @contextlib.contextmanager
    def _service(self) -> Iterator[str]:
        own = {ENV: str(self.folder), "TMPDIR": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}
        own |= {"FLOWINFER_KV": str(self.folder / "kv")}  # what the user's cache holds is no matter of the test
        command = [sys.executable, "-m", "flowinfer.testing.serve", str(self.folder)]
        with (self.folder / "errors").open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | own)
        lines: list[str] = []
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines, ready), daemon=True, name="test-service").start()
        try:
            with contextlib.suppress(queue.Empty):
                if address := ready.get(timeout=START_S):
                    yield address
                    return
            raise FlowInferError("The service of the test didn't start:\n" + "".join(lines[-20:]) + self._errors())
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.send_signal(signal.SIGINT)  # at once: what is still open belongs to nobody
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _errors(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")[-2_000:]

    def _go(self) -> None:
        fresh = self.folder / "going"
        self.began = time.monotonic()
        fresh.write_text(repr(self.began))
        fresh.replace(self.folder / GO)
        while not self.is_cut and not all_armed(self.folder, self.ready.plan):
            if time.monotonic() - self.began > START_S:
                raise FlowInferError(f"Not every worker of the test was armed within {START_S:g} s." + self._errors())
            time.sleep(LOOK_S)

    # -- cases ---------------------------------------------------------------------------------------------------------

    def _cases(self) -> None:
        if self.is_cut:
            self._await_results()
            return
        model = GatewayConfig.of(self.ready.plan).models[0]
        with ThreadPoolExecutor(max(1, len(self.ready.cases))) as pool:
            asked: list[Future[None]] = []
            for case in self.ready.cases:
                if case.at is None:
                    wait(asked)
                asked.append(pool.submit(self._ask, case, model))
            for future in asked:
                future.result()

    def _ask(self, case: Case, model: str) -> None:
        if case.at is not None:
            time.sleep(max(0.0, self.began + case.at - time.monotonic()))
        result = self.results[case.name]
        body = {"user": case.name, **case.body(model)}
        result.sent = time.monotonic()
        try:
            if self._wants_first(case):
                result.status, result.body, result.first = ask_streaming(self.address, case.path, body)
            else:
                result.status, result.body = ask_http(self.address, "POST", case.path, body)
        except (OSError, http.client.HTTPException, ValueError):
            result.status, result.body = "lost", {"error": {"message": "the connection broke"}}
        result.ended = time.monotonic()

    def _wants_first(self, case: Case) -> bool:
        run = self.test.expect
        of_run = run is not None and run.first_token_p95 is not None
        return of_run or (case.expect is not None and case.expect.first_token is not None)

    def _await_results(self) -> None:
        """Results of a cut come from within the front worker."""
        last = max((case.at or 0.0 for case in self.ready.cases), default=0.0)
        deadline = self.began + last + self.ready.plan.serve.request_timeout_s + BACK_S
        while time.monotonic() < deadline and any(not result.ended for result in self.results.values()):
            for line in self._lines(RESULTS):
                self.results[line["name"]] = Result(**line)
            time.sleep(LOOK_S)
        for result in self.results.values():
            if not result.ended:
                result.status, result.body = "stuck", {"error": {"message": "it never ended"}}

    # -- what is left --------------------------------------------------------------------------------------------------

    def _settled(self) -> Reading | None:
        """The metrics once every worker is back and has told its last counts."""
        if self.is_cut:
            return None
        wanted = {name for name, worker in self._instances()}
        deadline = time.monotonic() + BACK_S
        seen, same = None, 0
        while time.monotonic() < deadline and same < 10:  # workers tell theirs twice a second
            time.sleep(LOOK_S)
            with contextlib.suppress(FlowInferError, OSError, http.client.HTTPException):
                reading = self._metrics()
                assert reading is not None
                up = {dict(key[1])["worker"] for key, value in reading.values("worker_up").items() if value}
                counts = {key: value for key, value in reading.samples.items() if _is_count(key[0])}
                same = same + 1 if wanted <= up and counts == seen else 0
                seen = counts
        return reading

    def _instances(self) -> list[tuple[str, str]]:
        workers = self.ready.plan.workers.values()
        return [(f"{worker.name}.{replica}", worker.name) for worker in workers for replica in range(worker.replicas)]

    def _run(self, before: Reading | None, after: Reading | None) -> Run:
        counts = {name: 0 for name, _ in self._instances()}
        totals: dict[str, float] = {}
        left: list[str] = []
        if before is not None and after is not None:
            names = {key[0] for key in after.samples}
            totals = {name: (after.total(name) or 0.0) - (before.total(name) or 0.0) for name in names}
            for key, value in after.values("worker_restarts_total").items():
                counts[dict(key[1])["worker"]] = int(value)
            running = (after.total("requests_running") or 0) + (after.total("requests_waiting") or 0)
            left = [f"{running:.0f} requests are still open"] if running else []
        return Run(list(self.results.values()), self._passed(), restarts(self.ready.plan, counts), totals, left)

    def _passed(self) -> dict[str, list[Passed]]:
        names = {line["id"]: line["name"] for line in self._lines(NAMES)}
        found: dict[str, list[Passed]] = {}
        for line in sorted(self._lines(EDGES), key=lambda line: float(line["at"])):
            requests = tuple(names.get(request, request) for request in line["requests"])
            found.setdefault(line["edge"], []).append(Passed(line["at"], requests, line["holds"], line["told"]))
        return found

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _metrics(self) -> Reading | None:
        return None if self.is_cut else parse(self._get("/metrics"), time.monotonic())

    def _get(self, path: str) -> str:
        where = urlsplit(self.address)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def await_open(address: str) -> None:
    """Returns once the door is open: the workers are connected a moment after they are ready."""
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            if ask_http(address, "GET", "/ready", None)[0] == 200:
                return
        time.sleep(LOOK_S)
    raise FlowInferError("The service of the test didn't open its door.")


def _is_count(name: str) -> bool:
    """Counts of requests and frames stand still when nothing happens; processor time never does."""
    return name.endswith("_total") and not re.search("seconds|cpu", name) and not name.startswith("http_")


def _read(process: subprocess.Popen[str], lines: list[str], ready: queue.SimpleQueue[str]) -> None:
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith("READY"):
            ready.put(line.removeprefix("READY").strip() or "-")
    ready.put("")


def ask_streaming(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
    """Status and body of a streamed answer, put together as if it weren't, and when its first text came."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port, timeout=600)
    try:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return response.status, json.loads(response.read()), 0.0
        return _gathered(response)
    finally:
        connection.close()


def _gathered(events: http.client.HTTPResponse) -> tuple[int, dict[str, Any], float]:
    text, reason, first = "", None, 0.0
    usage: dict[str, Any] = {}
    for line in events:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return (
                int(event["error"].get("code") or 500) if str(event["error"].get("code")).isdigit() else 500,
                event,
                first,
            )
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            more = choice["text"] if "text" in choice else (choice["delta"].get("content") or "")
            first = first or (time.monotonic() if more else 0.0)
            text += more
            reason = choice.get("finish_reason") or reason
    return 200, {"choices": [{"text": text, "finish_reason": reason}], "usage": usage}, first
