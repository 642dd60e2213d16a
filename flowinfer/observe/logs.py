"""What the processes of a service log: lines of JSON in its run directory, by instance, bounded in size and in rate.

Any code logs by Python's `logging`; a line knows its worker and the stage at work. Written at once, so that it is
there after a kill -9; what comes faster than LINES_PER_S, or can't be written, is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

FOLDER = "logs"  # in the run directory
MAX_BYTES = 1 << 20  # of a file; with the old ones 4 MiB an instance
OLD_FILES = 3
LINES_PER_S, BURST = 200.0, 2_000.0  # a line costs 30 µs
MAX_TEXT = 8_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Line(msgspec.Struct, omit_defaults=True):
    """A line of a log. at: seconds since 1970; dropped: lines that were lost before this one; trace: of an error."""

    at: float
    level: str
    worker: str
    text: str
    stage: str = ""
    generation: int = 1
    logger: str = ""
    trace: str = ""
    dropped: int = 0


class _Now(threading.local):
    """The stage that this thread works for."""

    stage = ""


now = _Now()


class LogFile(RotatingFileHandler):
    """Writes records of one worker instance. num_dropped: lines that were lost since the process began."""

    def __init__(self, folder: Path, worker: str, generation: int = 1) -> None:
        (folder / FOLDER).mkdir(exist_ok=True)
        from flowinfer.observe import metrics  # only here: the supervisor needs none

        super().__init__(
            folder / FOLDER / f"{worker}.jsonl", maxBytes=MAX_BYTES, backupCount=OLD_FILES, encoding="utf-8"
        )
        self._worker, self._generation = worker, generation
        self._balance, self._at = BURST, time.monotonic()
        self._untold = 0
        self._count = metrics.counter("log_lines_dropped_total")
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        at = time.monotonic()
        self._balance = min(BURST, self._balance + (at - self._at) * LINES_PER_S)
        self._at = at
        if self._balance < 1.0:
            self._drop()
            return
        self._balance -= 1.0
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        line = Line(
            record.created,
            record.levelname,
            self._worker,
            record.getMessage()[:MAX_TEXT],
            stage=getattr(record, "stage", "") or now.stage,
            generation=self._generation,
            logger=record.name,
            trace=trace[-MAX_TEXT:],
            dropped=self._untold,
        )
        self._untold = 0
        return msgspec.json.encode(line).decode()

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """By the size that the file has: asking for the next line's would format it twice."""
        if self.stream is None:
            self.stream = self._open()
        return self.stream.tell() >= MAX_BYTES

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk, say: the line is lost, the service goes on."""
        self._drop()

    def _drop(self) -> None:
        self._untold += 1
        self.num_dropped += 1
        self._count.inc()


def start(folder: Path, worker: str, generation: int) -> LogFile:
    """Logs of this process go to the run directory from now on: `flowinfer` from INFO, libraries from WARNING."""
    handler = LogFile(folder, worker, generation)
    logging.getLogger().addHandler(handler)
    logging.getLogger("flowinfer").setLevel(logging.INFO)
    return handler


def set_level(level: str) -> None:
    """From which level on FlowInfer's own code logs, as files write it; the terminal shows none below a warning."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("flowinfer").setLevel(number)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(max(logging.WARNING, number))


def note(folder: Path, text: str, *, worker: str, level: str = "INFO") -> None:
    """Appends a line to the log of a process that doesn't log by `logging`: what the supervisor says."""
    path = folder / FOLDER / f"{worker}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(f"{path}.1")
        with path.open("ab") as file:
            file.write(msgspec.json.encode(Line(time.time(), level, worker, text[:MAX_TEXT])) + b"\n")
    except OSError:
        return  # a full disk: the supervisor has said it on the terminal as well


# ------------------------------------------------------------------------------------------------------------ reading


def read(folder: Path) -> list[Line]:
    """All lines of all processes, oldest first."""
    paths = sorted((folder / FOLDER).glob("*.jsonl*"), key=_age, reverse=True)
    lines = [line for path in paths for line in _parse(_bytes(path))]
    return sorted(lines, key=lambda line: line.at)


def _age(path: Path) -> int:
    """Of a rotated file, its number."""
    return int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # rotated away meanwhile: its successor is read


def _parse(data: bytes) -> Iterator[Line]:
    for line in data.splitlines():
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.MsgspecError:
            continue  # being written


class Follower:
    """New lines since the last look. Keeps its place in each file, also across a rotation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._read: dict[int, int] = {}  # bytes by inode

    def skip(self) -> None:
        """What is there now isn't new."""
        for path in self._folder.glob("*.jsonl*"):
            self._read[path.stat().st_ino] = path.stat().st_size

    def take(self) -> list[Line]:
        """Whole lines that have come since, oldest first."""
        lines: list[Line] = []
        for path in sorted(self._folder.glob("*.jsonl*"), key=_age, reverse=True):
            try:
                with path.open("rb") as file:
                    inode = path.stat().st_ino
                    file.seek(self._read.get(inode, 0))
                    data = file.read()
            except OSError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[inode] = self._read.get(inode, 0) + len(whole)
            lines += _parse(whole)
        return sorted(lines, key=lambda line: line.at)
