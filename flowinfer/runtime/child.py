"""One worker instance as the supervisor sees it: its process, its state, when to start it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from flowinfer.channel import Endpoints
from flowinfer.runtime.adopted import UNKNOWN, Adopted
from flowinfer.runtime.boot import Boot, Report, report_path
from flowinfer.runtime.run_dir import start_time
from flowinfer.runtime.state import Known
from flowinfer.runtime.threads import spinning

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 30.0
HEALTHY_S = 60.0  # after which the next death counts as the first

State = Literal["starting", "ready", "down"]
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class Child:
    """A worker instance over all its generations."""

    name: str
    worker: str
    replica: int
    generation: int = 0
    epoch: int = 0  # of the plan that this generation was started with
    state: State = "down"
    endpoints: Endpoints | None = None
    opening: str = ""  # the stage that it opens now
    started_at: float = 0.0
    ready_at: float = 0.0
    beat_at: float = 0.0
    closing_at: float = 0.0  # when it last said that it needs time to close
    restart_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    drained: bool = False
    on_trial: bool = False  # started for a change that isn't made yet
    leaving: bool = False  # gets nothing new and won't be started again
    failed: Report | None = None  # why it didn't start, on trial
    leases: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    lease_answers: set[str] = field(default_factory=set)
    process: subprocess.Popen[bytes] | Adopted | None = None
    refusal: Report | None = None  # why this process is ended: it can't work with the others
    _report: Path | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, boot: Boot, fds: Sequence[int], now: float) -> int:
        """Starts the process of this generation; returns its id. Raises OSError when there can't be one."""
        settings = {name: str(boot.threads) for name in _THREAD_SETTINGS}
        settings |= spinning(boot.crowded, os.environ)
        self._report = report_path(boot.run_dir, self.name, self.generation)
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", "flowinfer.runtime.worker_main", self.name],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            env=os.environ | settings,
            process_group=0,  # Ctrl-C in the terminal is for the supervisor alone
        )
        self.state, self.started_at, self.opening, self.closing_at = "starting", now, "", 0.0
        self.epoch = boot.plan.epoch
        self.leases, self.lease_answers = {}, set()
        stdin = process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(msgspec.json.encode(boot))
        return process.pid

    def known(self) -> Known:
        """What a supervisor that takes over has to know of this instance."""
        pid = self.process.pid if self.process is not None else 0
        return Known(
            name=self.name,
            worker=self.worker,
            replica=self.replica,
            generation=self.generation,
            epoch=self.epoch,
            state=self.state,
            pid=pid,
            started=start_time(pid) if pid else "",
            endpoints=self.endpoints,
            started_at=self.started_at,
            ready_at=self.ready_at,
            restart_at=self.restart_at,
            backoff_s=self.backoff_s,
            on_trial=self.on_trial,
            leaving=self.leaving,
        )

    def adopt(self, process: Adopted, folder: Path) -> None:
        """Goes on with a process that another supervisor started."""
        self.process, self._report = process, report_path(folder, self.name, self.generation)

    def ready(self, endpoints: Endpoints, now: float) -> None:
        self.state, self.endpoints, self.ready_at, self.beat_at = "ready", endpoints, now, now

    def buried(self, now: float) -> Report:
        """Books the death of the process and when to start the next; returns the cause."""
        assert self.process is not None
        lines = self._read_reports()
        self.opening = next((line.opening for line in reversed(lines) if line.opening), "")
        code = self.process.wait()
        report = self.refusal or next((line for line in lines if line.error), None)
        report = report or Report(error=self._describe_exit(code))
        self.refusal = None
        if self.state == "ready" and now - self.ready_at >= HEALTHY_S:
            self.backoff_s = FIRST_BACKOFF_S
        self.postpone(now)
        self.state, self.process, self.endpoints = "down", None, None
        return report

    def postpone(self, now: float) -> None:
        """Books when to start the next process, each time later."""
        self.restart_at = now + self.backoff_s
        self.backoff_s = min(LAST_BACKOFF_S, 2 * self.backoff_s)

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(sig)

    def _read_reports(self) -> list[Report]:
        if self._report is None:
            return []
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            lines = self._report.read_bytes().splitlines()
            self._report.unlink()
            return [msgspec.json.decode(line, type=Report) for line in lines]
        return []

    def _describe_exit(self, code: int) -> str:
        doing = f" while it opened stage {self.opening!r}" if self.state == "starting" and self.opening else ""
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"worker {self.name} was ended by {signal.Signals(-code).name}{hint}{doing}"
        if code == UNKNOWN:
            return f"worker {self.name} ended{doing}"
        return f"worker {self.name} ended with exit code {code}{doing}"
