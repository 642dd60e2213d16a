"""The record of an experiment on disk: a line of JSON for each outcome, in a file for each run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.experiment.outcome import End, Line, Memory, Outcome, Pair, Run
from flowinfer.runtime.rewire.journal import folder

MAX_LINES = 200_000  # some 60 MB: by then every interval is narrow, and the judge goes on all the same
KEPT = 20  # records of a service
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Line)


class Recorded(msgspec.Struct):
    """A record as it was read. end: None while it runs, or where the service died."""

    run: Run
    outcomes: list[Outcome]
    pairs: list[Pair]
    memory: list[Memory]
    end: End | None


def path_of(run: Run) -> Path:
    """Where the record of a run lies, beside the journals."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(run.at)) + f"-{int(run.at * 1e6) % 1_000_000:06}"
    return folder() / "experiments" / f"{_plain(run.service)}.{_plain(run.name)}.{stamp}.jsonl"


def append(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _make_room(path)
    with path.open("ab") as file:
        path.chmod(0o600)  # it may hold texts of users
        file.write(b"".join(_encoder.encode(line) + b"\n" for line in lines))


def _make_room(new: Path) -> None:
    """Deletes the oldest records of a service, so that with the new one there are KEPT."""
    for path in records(new.name.partition(".")[0])[: 1 - KEPT]:
        path.unlink(missing_ok=True)


def records(service: str = "", name: str = "") -> list[Path]:
    """Records of this service and experiment, the newest last."""
    pattern = f"{_plain(service) or '*'}.{_plain(name) or '*'}.*.jsonl"
    return sorted((folder() / "experiments").glob(pattern), key=lambda path: path.stat().st_mtime)


def read(path: Path) -> Recorded:
    """The record of a file; a line that a crash tore is left out. Raises FlowInferError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlowInferError(f"The record {path} can't be read: {error.strerror}.") from error
    found = [line for raw in data.splitlines() if (line := _decode(raw)) is not None]
    if not found or not isinstance(found[0], Run):
        raise FlowInferError(f"{path} is no record of an experiment.")
    recorded = Recorded(found[0], [], [], [], None)
    for line in found[1:]:
        if isinstance(line, Outcome):
            recorded.outcomes.append(line)
        elif isinstance(line, Pair):
            recorded.pairs.append(line)
        elif isinstance(line, Memory):
            recorded.memory.append(line)
        elif isinstance(line, End):
            recorded.end = line
    return recorded


def _decode(raw: bytes) -> Line | None:
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)
