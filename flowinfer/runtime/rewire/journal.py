"""The journal of a service's changes: a line a step, on disk before the next step begins. It outlives the service."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import msgspec

from flowinfer.runtime import run_dir
from flowinfer.runtime.rewire.protocol import Step

OVER = ("done", "refused", "failed", "abandoned")  # the last step of a change
MAX_BYTES = 4 << 20  # then the older half goes


def folder() -> Path:
    """Where journals lie: $XDG_STATE_HOME/flowinfer, by default ~/.local/state/flowinfer."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "flowinfer"


class Journal:
    """Steps of one service, by its name."""

    def __init__(self, service: str, parent: Path | None = None) -> None:
        parent = parent or folder()
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            writable = os.access(parent, os.W_OK)
        except OSError:
            writable = False
        if not writable:  # as in a container without a home: the service must run all the same
            parent = run_dir.root()
        self.path = parent / f"{re.sub(r'[^A-Za-z0-9._-]', '_', service)}.changes.jsonl"
        self._trim()

    def write(self, change: int, epoch: int, step: str, text: str = "") -> Step:
        """Appends a step and waits until the disk has it."""
        line = Step(at=time.time(), change=change, epoch=epoch, step=step, text=text)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def try_write(self, change: int, epoch: int, step: str, text: str = "") -> str:
        """As write; gives why it couldn't be written, as on a full disk, "" when it was."""
        try:
            self.write(change, epoch, step, text)
        except OSError as error:
            return f"The journal {self.path} can't be written: {error.strerror}."
        return ""

    def read(self) -> list[Step]:
        """All steps, oldest first; a line that a crash tore is left out."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [step for line in lines if (step := _decode(line))]

    def unfinished(self) -> list[Step]:
        """The steps of the last change, if its controller died in it."""
        steps = self.read()
        last = max((i for i, step in enumerate(steps) if step.step == "begin"), default=None)
        if last is None or any(step.step in (*OVER, "start") for step in steps[last:]):
            return []
        return steps[last:]

    def _trim(self) -> None:
        if self.path.exists() and self.path.stat().st_size > MAX_BYTES:
            lines = self.path.read_bytes().splitlines(keepends=True)
            self.path.write_bytes(b"".join(lines[len(lines) // 2 :]))


def _decode(line: bytes) -> Step | None:
    try:
        return msgspec.json.decode(line, type=Step)
    except msgspec.MsgspecError:
        return None
