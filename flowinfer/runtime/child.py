"""One worker instance as the supervisor sees it: its process, its state, when to start it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from flowinfer.channel import Endpoints
from flowinfer.runtime.boot import Boot, Report

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 30.0
HEALTHY_S = 60.0  # after which the next death counts as the first

State = Literal["starting", "ready", "down"]
_SPINS = "20000"  # about 10 us: a thread whose peer lost its core to another process sleeps instead of burning its own
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class Child:
    """A worker instance over all its generations."""

    name: str
    worker: str
    replica: int
    generation: int = 0
    state: State = "down"
    endpoints: Endpoints | None = None
    opening: str = ""  # the stage that it opens now
    started_at: float = 0.0
    ready_at: float = 0.0
    beat_at: float = 0.0
    restart_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    drained: bool = False
    on_trial: bool = False  # started for a change that isn't made yet
    leaving: bool = False  # gets nothing new and won't be started again
    failed: Report | None = None  # why it didn't start, on trial
    leases: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    lease_answers: set[str] = field(default_factory=set)
    process: subprocess.Popen[bytes] | None = None
    _report_fd: int = -1

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, boot: Boot, fds: Sequence[int], now: float) -> None:
        """Starts the process of this generation; `boot.report_fd` is its end of the report pipe and closed here."""
        settings = {name: str(boot.threads) for name in _THREAD_SETTINGS}
        settings["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", _SPINS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowinfer.runtime.worker_main", self.name],
            stdin=subprocess.PIPE,
            pass_fds=(*fds, boot.report_fd),
            env=os.environ | settings,
            process_group=0,  # Ctrl-C in the terminal is for the supervisor alone
        )
        os.close(boot.report_fd)
        self.state, self.started_at, self.opening = "starting", now, ""
        self.leases, self.lease_answers = {}, set()
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(msgspec.json.encode(boot))

    def open_report(self) -> int:
        """Makes the pipe on which the next process tells why it failed; returns the writing end."""
        self._report_fd, write = os.pipe()
        os.set_blocking(self._report_fd, False)
        return write

    def ready(self, endpoints: Endpoints, now: float) -> None:
        self.state, self.endpoints, self.ready_at, self.beat_at = "ready", endpoints, now, now

    def buried(self, now: float) -> Report:
        """Books the death of the process and when to start the next; returns the cause."""
        assert self.process is not None
        lines = self._read_reports()
        self.opening = next((line.opening for line in reversed(lines) if line.opening), "")
        code = self.process.wait()
        report = next((line for line in lines if line.error), None) or Report(error=self._describe_exit(code))
        if self.state == "ready" and now - self.ready_at >= HEALTHY_S:
            self.backoff_s = FIRST_BACKOFF_S
        self.restart_at = now + self.backoff_s
        self.backoff_s = min(LAST_BACKOFF_S, 2 * self.backoff_s)
        self.state, self.process, self.endpoints = "down", None, None
        return report

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(sig)

    def _read_reports(self) -> list[Report]:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._report_fd, 65_536):
                data += chunk
        os.close(self._report_fd)
        with contextlib.suppress(msgspec.MsgspecError):
            return [msgspec.json.decode(line, type=Report) for line in data.splitlines()]
        return []

    def _describe_exit(self, code: int) -> str:
        doing = f" while it opened stage {self.opening!r}" if self.state == "starting" and self.opening else ""
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"worker {self.name} was ended by {signal.Signals(-code).name}{hint}{doing}"
        return f"worker {self.name} ended with exit code {code}{doing}"
