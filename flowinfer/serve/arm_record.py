"""The record of an experiment as the door keeps it: lines to disk once a second, by the pool, and metrics by arm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flowinfer.experiment import record
from flowinfer.experiment.outcome import End, Line, Outcome, Run
from flowinfer.observe import metrics
from flowinfer.stage import Context

log = logging.getLogger(__name__)
WRITE_S = 1.0  # between two writes
TIMES = (
    ("ttft", "arm_time_to_first_token_seconds"),
    ("itl", "arm_time_per_output_token_seconds"),
    ("latency", "arm_request_latency_seconds"),
)


class ArmRecord:
    """Of one run, which begins with `begin`. memory: lines that tell what the arms hold, asked at each write."""

    def __init__(self, run: Run, ctx: Context, memory: Callable[[], list[Line]]) -> None:
        self._run, self._ctx, self._memory = run, ctx, memory
        self._path: Path | None = None
        self._lines: list[Line] = []
        self._num_lines = 0
        self._armed = False
        labels = {"experiment": run.name}
        self._requests = metrics.counter("arm_requests_total")
        self._times = {
            what: {arm: metrics.histogram(name).labels(arm=arm, **labels) for arm in "ab"} for what, name in TIMES
        }

    @property
    def has_begun(self) -> bool:
        """True once there is something to record."""
        return self._path is not None

    def begin(self) -> None:
        """Opens the record, on first use."""
        if self._path is None:
            self._path = record.path_of(self._run)
            self.add(self._run)

    def add(self, line: Line) -> None:
        """Takes a line, to be written soon. Beyond MAX_LINES only the end."""
        if self._num_lines >= record.MAX_LINES and not isinstance(line, End):
            return
        self._num_lines += 1
        self._lines.append(line)
        if not self._armed:
            self._armed = True
            self._ctx.call_at(self._ctx.clock.now() + WRITE_S, self.write)

    def measure(self, outcome: Outcome) -> None:
        """Counts an outcome in the metrics of its arm."""
        result = "failed" if outcome.failed else "refused" if outcome.error else "answered"
        self._requests.labels(experiment=self._run.name, arm=outcome.arm, result=result).inc()
        for what, into in self._times.items():
            if (value := outcome.figure(what)) is not None:
                into[outcome.arm].observe(value)

    def write(self, *, at_once: bool = False) -> None:
        """Writes what waits, in the pool unless it has to be at once."""
        self._armed = False
        if self._path is None or not self._lines:
            return
        lines, self._lines = [*self._lines, *self._memory()], []
        work = partial(record.append, self._path, lines)
        if at_once:
            self._wrote(_tried(work))
        else:
            self._ctx.submit(partial(_tried, work), self._wrote)

    def _wrote(self, result: BaseException | None) -> None:
        if isinstance(result, BaseException):
            log.warning("the record of experiment %s can't be written: %s", self._run.name, result)


def _tried(work: partial[None]) -> BaseException | None:
    try:
        work()
    except OSError as error:
        return error
    return None
