"""Stages that stand in for others in a test: a mock speaks from a recording, `outside` stands around a cut.

Their ports are those of the edges that they end, so their classes are made by name:
`flowinfer.testing.mocks:Mock__prompts_Prompt__Tokens` takes Prompt on `prompts` and gives Tokens. So they can be named
in a plan, and a worker process finds them like any other stage.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from flowinfer.codec import Codec
from flowinfer.codec import Header as FrameHeader
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.flow.file import Record, read
from flowinfer.message import Ended, Event, Failure, Message, Text, Tokens, type_registry
from flowinfer.observe.where import requests_of
from flowinfer.runtime.rewire.split import split
from flowinfer.stage import Stage, StageConfig
from flowinfer.stage import ports as ports_of

IGNORED = frozenset(("id", "deadline", "prefix", "seed", "arm"))  # of a message, when it is looked for in a recording


class MockConfig(StageConfig):
    """What a mock speaks from. inward, outward: its edges, by name as in the recording."""

    recording: str
    inward: tuple[str, ...]
    outward: tuple[str, ...]
    speed: float = 1.0  # 0: at once


class Mock(Stage):
    """Gives what the recording says that these stages gave to the same message, after the same time."""

    Config = MockConfig

    def open(self) -> None:
        self._answers = Answers.of(read_recording(self.config.recording), self.config.inward, self.config.outward)
        self._open: set[str] = set()

    def take(self, messages: Sequence[Any]) -> None:
        """Begins to answer these messages."""
        for message in messages:
            for request in requests_of(message):
                try:
                    answer = self._answers.find(message)
                except FlowInferError as error:
                    self.ctx.fail(request, RequestError(500, str(error), code="not_recorded"))
                    continue
                self._begin(request, answer)

    def _begin(self, request: str, answer: Answer) -> None:
        self._open.add(request)
        now = self.ctx.clock.now()
        for after, message in answer.messages:
            at = now + (after / self.config.speed if self.config.speed else 0.0)
            self.ctx.call_at(at, lambda message=message: self._say(request, answer.request, message), request=request)  # type: ignore[misc]
        if not answer.is_whole:
            last = answer.messages[-1][0] if answer.messages else 0.0
            self.ctx.call_at(now + last, lambda: self._give_up(request), request=request)

    def _say(self, request: str, recorded: str, message: Message) -> Iterable[Message]:
        if request not in self._open:
            return ()
        if ends(message, recorded):
            self._open.discard(request)
        return (renamed(message, recorded, request),)

    def _give_up(self, request: str) -> None:
        if request in self._open:
            self._open.discard(request)
            self.ctx.fail(
                request, RequestError(500, "The recording ends in the middle of this answer.", code="not_recorded")
            )

    def cancel(self, requests: Collection[str]) -> None:
        self._open.difference_update(requests)


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


_recordings: dict[tuple[str, int, int], list[Record]] = {}


def read_recording(path: str) -> list[Record]:
    """The records of a recording; read once, as long as the file stays as it is."""
    file = Path(path)
    if not file.exists():
        raise FlowInferError(f"There is no recording {path}.", help="flowinfer record FILE -o x.flow makes one.")
    key = (path, file.stat().st_mtime_ns, file.stat().st_size)
    if key not in _recordings:
        _recordings[key] = read(file).records
    return _recordings[key]


# ----------------------------------------------------------------------------------------------------- around a cut


Sink = Callable[[str, "Message | RequestError | None"], None]


class Outside(Stage):
    """Stands around a cut, in the place of the api: gives what goes in, takes what comes out, sees requests end."""

    listens = (Failure,)

    def open(self) -> None:
        self._due: deque[Message] = deque()
        self._sinks: dict[str, Sink] = {}

    @property
    def busy(self) -> bool:
        return bool(self._due) and not any(self.ctx.full(port) for port in self.outputs)

    outputs: ClassVar[tuple[str, ...]] = ()

    def expect(self, message: Message, sink: Sink) -> None:
        """The sink gets what comes out of this message's requests, then None, or an error."""
        self._sinks.update(dict.fromkeys(requests_of(message), sink))

    def give(self, message: Message) -> None:
        """Puts a message into the cut."""
        self._due.append(message)

    def take(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Notes what has come out, and gives what is due."""
        for message in messages:
            done = [request for request in self._told(message) if ends(message, request)]
            for request in done:
                self._end(request, None)
            if done:
                yield Ended(ids=done)
        while self.busy:
            yield self._due.popleft()

    def _told(self, message: Message) -> Iterator[str]:
        """Gives the sinks their parts; yields the requests."""
        for request in dict.fromkeys(requests_of(message)):
            mine, _ = split(message, {request})
            if mine is not None and request in self._sinks:
                self._sinks[request](request, mine)
                yield request

    def _end(self, request: str, error: RequestError | None) -> None:
        sink = self._sinks.pop(request, None)
        if sink is not None:
            sink(request, error)

    def observe(self, event: Event) -> None:
        if isinstance(event, Failure):
            self._end(event.id, RequestError(event.status, event.message, code=event.code, param=event.param))

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            self._end(request, RequestError(499, "The request was cancelled.", code="cancelled"))


# ------------------------------------------------------------------------------------------------- classes by name


def kind_of(base: str, inputs: Mapping[str, str], outputs: Sequence[str]) -> str:
    """The kind of a stand-in with these inputs (message type by port) and outputs (message types)."""
    given = "_".join(f"{port}_{message}" for port, message in inputs.items())
    return f"{__name__}:{base}__{given}__{'_'.join(outputs)}"


def __getattr__(name: str) -> type[Stage]:
    base, _, rest = name.partition("__")
    if base not in ("Mock", "Outside") or "__" not in rest:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    given, _, outputs = rest.partition("__")
    words = given.split("_")
    ports, kinds = _ports(words)
    return _made(base, dict(zip(ports, kinds, strict=True)), [word for word in outputs.split("_") if word])


def _ports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """`prompts_Prompt_more_calls_Call` is prompts: Prompt and more_calls: Call; types begin with a capital."""
    ports, kinds, name = list[str](), list[str](), list[str]()
    for word in words:
        if word[:1].isupper():
            ports.append("_".join(name))
            kinds.append(word)
            name = []
        elif word:
            name.append(word)
    return ports, kinds


def _made(base: str, inputs: Mapping[str, str], outputs: Sequence[str]) -> type[Stage]:
    kinds: dict[str, Any] = {port: type_registry[message] for port, message in inputs.items()}
    given: Any = None
    for message in outputs:
        given = type_registry[message] if given is None else given | type_registry[message]

    def step(self: Any, *inputs: list[Message]) -> Iterable[Message]:
        messages = [message for batch in inputs for message in batch]
        return self.take(messages) or ()

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *kinds)]
    step.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    step.__annotations__ = {port: list[kind] for port, kind in kinds.items()}  # type: ignore[valid-type]
    step.__annotations__["return"] = Iterable[given] if given is not None else None
    parent = Mock if base == "Mock" else Outside
    made = type(base, (parent,), {"step": step, "kind": base.lower(), "__module__": __name__})
    made.outputs = tuple(port.name for port in ports_of(made)[1])  # type: ignore[attr-defined]
    return made
