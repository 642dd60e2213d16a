"""What a recording says of a message: found by its content, as the answer to another request. Runs nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowinfer.codec import Codec
from flowinfer.codec import Header as FrameHeader
from flowinfer.errors import FlowInferError
from flowinfer.flow.file import Record, read
from flowinfer.message import Message, Text, Tokens
from flowinfer.observe.where import requests_of
from flowinfer.runtime.rewire.split import split

IGNORED = frozenset(("id", "deadline", "prefix", "seed", "arm"))  # of a message, when it is looked for in a recording


class Answer(msgspec.Struct):
    """What was said of one recorded request: seconds after it came in, and message."""

    request: str
    messages: list[tuple[float, Message]]
    is_whole: bool


class Answers:
    """What a recording says, by the content of what came in."""

    def __init__(self, answers: Mapping[bytes, Answer], asked: Sequence[Message]) -> None:
        self._answers, self._asked = answers, asked

    @classmethod
    def of(cls, records: Sequence[Record], inward: Collection[str], outward: Collection[str]) -> Answers:
        """From the records of a recording."""
        asked = {
            request: record for record in records if record.edge in inward for request in requests_of(record.message)
        }
        given: dict[str, Answer] = {request: Answer(request, [], False) for request in asked}
        for record in records:
            for request in requests_of(record.message) if record.edge in outward else ():
                if request in given:
                    mine, _ = split(copied(record.message), {request})
                    assert mine is not None
                    given[request].messages.append((max(0.0, record.at - asked[request].at), mine))
                    given[request].is_whole |= ends(mine, request)
        answers = {content(record.message): given[request] for request, record in reversed(asked.items())}
        return cls(answers, [record.message for record in asked.values()])

    def find(self, message: Message) -> Answer:
        """The answer to a message of this content. Raises FlowInferError that tells the nearest."""
        found = self._answers.get(content(message))
        if found is not None:
            return found
        near = min(self._asked, key=lambda other: len(_differences(message, other)), default=None)
        if near is None:
            raise FlowInferError("The recording holds no request.")
        differs = ", ".join(_differences(message, near))
        kind = type(message).__name__
        raise FlowInferError(f"The recording holds no such {kind}; the nearest differs in {differs}. Record it too.")


def content(message: Any) -> bytes:
    """What a message says, without what names or dates it."""
    return msgspec.msgpack.encode(_plain(message), order="deterministic")


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__ if name not in IGNORED}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _differences(a: Message, b: Message) -> list[str]:
    found: list[str] = []
    mine, other = _plain(a), _plain(b)
    for name in {**mine, **other}:
        one, two = mine.get(name), other.get(name)
        if one != two and isinstance(one, dict) and isinstance(two, dict):
            found += [
                f"{name}.{key} ({one.get(key)!r:.60} here, {two.get(key)!r:.60} there)"
                for key in {**one, **two}
                if one.get(key) != two.get(key)
            ]
        elif one != two:
            found.append(f"{name} ({one!r:.60} here, {two!r:.60} there)")
    return found


def ends(message: Message, request: str) -> bool:
    """Whether this is the last that is said of a request. A message of one request is all of it."""
    if isinstance(message, Tokens):
        return any(message.ids[row] == request for row in message.finished)
    if isinstance(message, Text):
        return any(piece.id == request and piece.finish is not None for piece in message.pieces)
    return hasattr(message, "id")


def renamed(message: Any, old: str, new: str) -> Message:
    """A copy that speaks of another request."""
    made: Any = copied(message)
    if hasattr(made, "id"):
        made.id = new
    if isinstance(made, Tokens):
        made.ids = [new if id == old else id for id in made.ids]
    for part in (*getattr(made, "pieces", ()), *getattr(made, "opened", ())):
        if part.id == old:
            part.id = new
    return made  # type: ignore[no-any-return]


def copied(message: Message) -> Message:
    """A copy that shares nothing."""
    codec = Codec()
    return codec.decode(codec.encode(FrameHeader(type(message).__name__, "test", 1), [message]))[1][0]


_recordings: dict[tuple[str, int, int, frozenset[str]], list[Record]] = {}


def read_recording(path: str, edges: Collection[str]) -> list[Record]:
    """What was recorded on these edges; read once, as long as the file stays as it is."""
    file = Path(path)
    if not file.exists():
        raise FlowInferError(f"There is no recording {path}.", help="flowinfer record FILE -o x.flow makes one.")
    key = (path, file.stat().st_mtime_ns, file.stat().st_size, frozenset(edges))
    if key not in _recordings:
        _recordings[key] = read(file, edges).records
    return _recordings[key]
