"""Runs services of plain stages in processes of their own, for the tests of the runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from flowinfer.graph.plan import EdgePlan, Plan, ServePlan, StagePlan, WorkerPlan

HERE = Path(__file__).parent
PATIENCE_S = 60.0  # on a busy machine; nothing here waits for time to pass
MODULE = "stages_for_tests"


def until(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S} s: {what}"
        time.sleep(0.02)


class Service:
    """A supervisor in a process of its own, `kept` by a keeper or alone."""

    def __init__(self, plan: Plan, folder: Path, hung_s: float, *, kept: bool = False, max_deaths: int = 5) -> None:
        self.file = folder / "notes.txt"
        self.file.touch()
        self.log = folder / "log.txt"
        self.tmp = folder
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        limit = [str(max_deaths)] if kept else []
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_plan.py"), str(folder / "plan.json"), str(hung_s), *limit],
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)},
        )
        self.seen: dict[int, psutil.Process] = {}

    def workers(self) -> dict[str, psutil.Process]:
        """Live worker processes by instance."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                self.seen[child.pid] = child
                if "flowinfer.runtime.worker_main" in child.cmdline():
                    found[child.cmdline()[-1]] = child
            except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
                continue
        return found

    def has_new(self, name: str, old_pid: int) -> bool:
        found = self.workers().get(name)
        return found is not None and found.pid != old_pid

    def lines(self, prefix: str) -> list[str]:
        return [line for line in self.file.read_text().splitlines() if line.startswith(prefix)]

    def wait_ready(self) -> None:
        until(lambda: "READY" in self.log.read_text() or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.log.read_text()
        self.workers()

    def leftovers(self) -> list[str]:
        alive = [f"process {p.pid}" for p in self.seen.values() if p.is_running() and p.status() != "zombie"]
        folder = self.tmp / f"flowinfer-{os.getuid()}"
        return alive + [str(path) for path in folder.glob("*") if path.name != ".lock"]

    def wait_gone(self) -> None:
        self.process.wait(PATIENCE_S)
        until(lambda: not self.leftovers(), f"nothing left, but {self.leftovers()}")


Start = Callable[..., Service]


def edge(source: str, target: str, message: str, port: str, capacity: int = 16) -> EdgePlan:
    name = f"{source} -> {target}"
    return EdgePlan(name=name, source=source, target=target, message=message, port=port, capacity=capacity)


def stage(name: str, kind: str, worker: str, **config: object) -> StagePlan:
    return StagePlan(name=name, kind=f"{MODULE}:{kind}", config=config, worker=worker, mark=f"pipe.yaml:{len(name)}:3")


def plan_of(stages: list[StagePlan], edges: list[EdgePlan], tmp: Path, **replicas: int) -> Plan:
    names = dict.fromkeys(found.worker for found in stages)
    return Plan(
        name="test",
        digest="",
        file=str(tmp / "pipe.yaml"),
        stages={found.name: found for found in stages},
        edges=tuple(edges),
        workers={
            name: WorkerPlan(
                name=name, stages=tuple(s.name for s in stages if s.worker == name), replicas=replicas.get(name, 1)
            )
            for name in names
        },
        serve=ServePlan(port=0, drain_timeout_s=30.0),
    )


def loaded(tmp: Path, **door: object) -> Plan:
    """Three workers with requests that go round."""
    gate = door.pop("gate", "")
    return plan_of(
        [
            stage("api", "Door", "front", file=str(tmp / "notes.txt"), **door),
            stage("relay", "CallRelay", "middle"),
            stage("answer", "Answerer", "back", gate=gate),
        ],
        [
            edge("api", "relay", "Call", "calls"),
            edge("relay", "answer", "Call", "calls"),
            edge("answer", "api", "Text", "texts"),
        ],
        tmp,
    )
