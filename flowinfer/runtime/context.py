"""What one stage may use of its worker: flowinfer.stage.Context over the group that runs it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import RequestError
from flowinfer.message import Event, Message
from flowinfer.stage import Arena, Clock, Result, Shared

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group
    from flowinfer.runtime.stage_run import StageRun


class StageContext:
    """Context of one stage. Everything with state lives in the group."""

    run: StageRun  # set by the group once the stage exists
    _held_back: list[Callable[[], None]] | None = None

    def __init__(self, group: Group, stage: str) -> None:
        self._group = group
        self.stage = stage
        self.worker: str = group.name
        self.generation: int = group.generation
        self.device: str = group.host.device
        self.threads: int = group.host.threads
        self.kernels: str = group.plan.kernels
        self.clock: Clock = group.clock
        self.listener: socket.socket | None = group.host.listener

    def hold_back(self) -> None:
        """The stage is opened outside the loop: what it asks of the worker waits for `let_go`."""
        self._held_back = []

    def let_go(self) -> None:
        """The stage takes part from now on."""
        held, self._held_back = self._held_back or [], None
        for act in held:
            act()

    def submit(
        self,
        fn: Callable[[], Result],
        then: Callable[[Result | BaseException], Iterable[Message] | None],
        *,
        request: str = "",
    ) -> None:
        self._group.submit(self.run, fn, then, request)

    def call_at(self, when: float, fn: Callable[[], Iterable[Message] | None], *, request: str = "") -> None:
        if self._held_back is not None:
            self._held_back.append(lambda: self._group.call_at(self.run, when, fn, request))
        else:
            self._group.call_at(self.run, when, fn, request)

    def fail(self, request: str, error: RequestError) -> None:
        self._group.fail(self.stage, request, error)

    def wake(self) -> None:
        self._group.wake()

    def full(self, output: str) -> bool:
        return self.run.full(output)

    def give_back(self, port: str, request: str) -> None:
        self._group.give_back(self.run, port, request)

    def offer(self, port: str, amount: int) -> None:
        if self._held_back is not None:
            self._held_back.append(lambda: self._group.offer(self.run, port, amount))
        else:
            self._group.offer(self.run, port, amount)

    def reserve(self, output: str, request: str, amount: int) -> str | None:
        outbox = self.run.outbox_of(output, self._group.arms.get(request, "a"))
        return self.worker if outbox is None else outbox.reserve(request, amount)

    def unreserve(self, output: str, request: str) -> None:
        outbox = self.run.outbox_of(output, self._group.arms.get(request, "a"))
        if outbox is not None:
            outbox.unreserve(request)

    def send(self, event: Event, to: str | None = None) -> None:
        if self._held_back is not None:
            self._held_back.append(lambda: self._group.emit(event, to))
        else:
            self._group.emit(event, to)

    def instances(self, kind: str) -> list[str]:
        return self._group.instances(kind, self.run.plan.arm)

    def take_over(self, request: str, *, shared: bool = False) -> bool:
        return self._group.take_over(request, shared=shared)

    def hand_on(self, request: str, to: str = "") -> None:
        self._group.hand_on(request, to)

    def is_over(self, request: str) -> bool:
        return request in self._group.closed

    def shared(self, key: object, make: Callable[[], Shared], *, arms: bool = False) -> Shared:
        objects = self._group.objects
        if not arms and self.run.plan.arm == "b":
            key = ("arm b", key)
        if key not in objects:
            objects[key] = make()
        return cast(Shared, objects[key])

    def settings_of(self, kind: str) -> list[dict[str, Any]]:
        """Those that the requests of this stage meet: of another arm's stages, none."""
        stages = [stage for stage in self._group.plan.stages.values() if stage.kind == kind]
        other = "a" if self.run.plan.arm == "b" else "b"
        return [stage.config for stage in stages if stage.arm != other]

    def still_closing(self, doing: str, since: float) -> bool:
        return self._group.still_closing(doing, since)

    def arena(self, layout: KVLayout) -> Arena:
        return self._group.host.arena(layout)
