"""Stages that stand in for others in a test: a mock speaks from a recording, `outside` stands around a cut.

Their ports are those of the edges that they end, so their classes are made by name:
`flowinfer.testing.mocks:Mock__prompts_Prompt__Tokens` takes Prompt on `prompts` and gives Tokens. So they can be named
in a plan, and a worker process finds them like any other stage.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.message import Ended, Event, Failure, Message, type_registry
from flowinfer.observe.where import requests_of
from flowinfer.runtime.rewire.split import split
from flowinfer.stage import Stage, StageConfig
from flowinfer.stage import ports as ports_of
from flowinfer.testing.answers import Answer, Answers, ends, read_recording, renamed


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
        inward, outward = self.config.inward, self.config.outward
        self._answers = Answers.of(read_recording(self.config.recording, {*inward, *outward}), inward, outward)
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
