"""What a stage is given in its unit test: a context that records what it is told, by a clock that stands still."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.message import Event, Message
from flowinfer.runtime.clock import FakeClock
from flowinfer.stage import Arena, Clock, Stage

Made = TypeVar("Made")
Result = TypeVar("Result")
OneStage = TypeVar("OneStage", bound=Stage)


class FakeContext:
    """Records failures and events; runs background work at once; credit is without end. `time` moves its clock."""

    def __init__(self, stage: str = "stage") -> None:
        self.stage = stage
        self.worker, self.generation, self.device, self.threads = "front.0", 1, "cpu", 1
        self.kernels = ""
        self.time = FakeClock()
        self.clock: Clock = self.time
        self.listener: socket.socket | None = None
        self.failed: dict[str, RequestError] = {}
        self.sent: list[tuple[Event, str | None]] = []
        self.timers: list[tuple[float, Callable[[], Iterable[Message] | None]]] = []
        self.given: list[Message] = []  # what background work returned
        self.returned: list[tuple[str, str]] = []  # credit given back: port, request
        self.full_outputs: set[str] = set()  # for a test to fill, as is
        self.over: set[str] = set()  # requests that have had their end
        self._shared: dict[object, Any] = {}

    def submit(
        self,
        fn: Callable[[], Result],
        then: Callable[[Result | BaseException], Iterable[Message] | None],
        *,
        request: str = "",
    ) -> None:
        outcome: Result | BaseException
        try:
            outcome = fn()
        except Exception as error:
            outcome = error
        self.given += then(outcome) or ()

    def call_at(self, when: float, fn: Callable[[], Iterable[Message] | None], *, request: str = "") -> None:
        self.timers.append((when, fn))

    def fail(self, request: str, error: RequestError) -> None:
        self.failed[request] = error

    def wake(self) -> None:
        """Nobody sleeps here."""

    def full(self, output: str) -> bool:
        return output in self.full_outputs

    def give_back(self, port: str, request: str) -> None:
        self.returned.append((port, request))

    def offer(self, port: str, amount: int) -> None:
        """Credit is without end."""

    def reserve(self, output: str, request: str, amount: int) -> str | None:
        return None if output in self.full_outputs else self.worker

    def unreserve(self, output: str, request: str) -> None:
        """Nothing was taken."""

    def send(self, event: Event, to: str | None = None) -> None:
        self.sent.append((event, to))

    def instances(self, kind: str) -> list[str]:
        return []

    def take_over(self, request: str, *, shared: bool = False) -> bool:
        return not self.is_over(request)

    def hand_on(self, request: str, to: str = "") -> None:
        """Nobody keeps count."""

    def is_over(self, request: str) -> bool:
        return request in self.failed or request in self.over

    def shared(self, key: object, make: Callable[[], Made], *, arms: bool = False) -> Made:
        if key not in self._shared:
            self._shared[key] = make()
        made: Made = self._shared[key]
        return made

    def settings_of(self, kind: str) -> list[dict[str, Any]]:
        return []

    def still_closing(self, doing: str, since: float) -> bool:
        return False  # a test waits for nothing

    def arena(self, layout: KVLayout) -> Arena:
        raise FlowInferError("a fake context has no KV memory.", help="Test the stage in a LocalService.")


def opened(stage: type[OneStage], ctx: FakeContext | None = None, **config: Any) -> OneStage:
    """The stage with these settings, checked and opened; its `ctx` is a FakeContext."""
    made = stage(stage.Config.model_validate(config), ctx or FakeContext(stage.kind))
    made.open()
    return made
