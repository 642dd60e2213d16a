"""Decides who may come in: pure, told the state of the service, answers with the refusal or None."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from flowinfer.errors import RequestError

# Seconds that a refused client is told to wait. Slots free at the pace of answers, so a full house is worth an early
# retry; a worker needs seconds to load its weights again; a service that drains won't take this client back.
RETRY_FULL_S = 1.0
RETRY_DOWN_S = 5.0
RETRY_DRAIN_S = 10.0


@dataclass
class Admission:
    """Admits up to max_requests open sequences while all workers run and the service doesn't drain."""

    max_requests: int
    serving: bool = False  # all workers have started
    draining: bool = False
    _aside: set[str] = field(default_factory=set)  # workers of an arm B, without which arm A goes on
    _arm: set[str] = field(default_factory=set)  # of those, the workers of the experiment that runs
    _up: dict[str, int] = field(default_factory=dict)  # instance -> generation
    _down: dict[str, int] = field(default_factory=dict)

    def worker_up(self, worker: str, generation: int) -> None:
        if generation > self._down.get(worker, -1):
            self._down.pop(worker, None)
            self._up[worker] = generation
            if (name := worker.rpartition(".")[0]) not in self._arm:
                self._aside.discard(name)

    def set_aside(self, workers: Collection[str]) -> None:
        """Workers that only an experiment needs: their death keeps nobody out, also when the experiment is over."""
        self._arm = set(workers)
        self._aside |= self._arm

    def runs(self, worker: str) -> bool:
        """True while an instance of this worker runs."""
        return any(instance.rpartition(".")[0] == worker for instance in self._up)

    def worker_down(self, worker: str, generation: int) -> None:
        if generation >= self._up.get(worker, -1):
            self._up.pop(worker, None)
            self._down[worker] = generation

    def missing(self) -> str | None:
        """A worker of which no instance runs, if there is one. Instances are named `<worker>.<replica>`."""
        running = {instance.rpartition(".")[0] for instance in self._up}
        down = (instance.rpartition(".")[0] for instance in self._down)
        return next((worker for worker in down if worker not in running and worker not in self._aside), None)

    def refusal(self, num_open: int, wanted: int, *, full: bool) -> tuple[str, RequestError] | None:
        """Why `wanted` more sequences can't come in (a word for the metrics, the error), or None."""
        if self.draining:
            return "draining", _busy(503, "The service is stopping and takes no new requests.", RETRY_DRAIN_S)
        if not self.serving:
            return "starting", _busy(503, "The service is starting.", RETRY_DOWN_S)
        if (worker := self.missing()) is not None:
            message = f"Worker {worker!r} is down and being started again."
            return "worker_down", _busy(503, message, RETRY_DOWN_S)
        if num_open + wanted > self.max_requests:
            message = f"The service is full: {num_open} of {self.max_requests} requests are open."
            return "max_requests", _busy(429, message, RETRY_FULL_S)
        if full:
            return "pipeline_full", _busy(429, "The service is full: its first queue takes no more.", RETRY_FULL_S)
        return None


def _busy(status: int, message: str, retry_after_s: float) -> RequestError:
    code = "overloaded" if status == 429 else "service_unavailable"
    return RequestError(status, message, code=code, retry_after_s=retry_after_s)
