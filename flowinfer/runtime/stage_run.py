"""One stage at work in a group: its inboxes, its outputs, and whether it may be stepped now."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flowinfer.graph.plan import API, EdgePlan, StagePlan
from flowinfer.message import Message, type_registry
from flowinfer.runtime.inbox import Debt, Inbox
from flowinfer.runtime.outbox import Outbox, has_tokens
from flowinfer.stage import Stage, ports

if TYPE_CHECKING:
    from flowinfer.runtime.context import StageContext
    from flowinfer.runtime.rewire.graft import Layer

Put = Callable[[Message], None]
Outputs = dict[str, "list[FusedEdge | Outbox]"]  # by class name of the message


class FusedEdge:
    """An edge whose ends are in one worker: a list."""

    def __init__(self, edge: EdgePlan, inbox: Inbox) -> None:
        self.edge = edge
        self._messages = inbox.messages
        self.put: Put = inbox.messages.append

    @property
    def full(self) -> bool:
        return len(self._messages) >= self.edge.capacity

    def ends_in(self, inbox: Inbox) -> bool:
        return self._messages is inbox.messages


class StageRun:
    """A stage with its queues. layers: where requests go that were open when its outputs changed, oldest first."""

    context: StageContext

    def __init__(self, plan: StagePlan, stage: Stage, held: frozenset[str]) -> None:
        inputs, outputs = ports(type(stage))
        step: Any = type(stage).step  # type: ignore[attr-defined]
        names = [name for name in inspect.signature(step).parameters if name != "self"]
        self.plan = plan
        self.name = plan.name
        self._is_api = plan.name == API
        self.stage = stage
        self.held = held
        self.input_types = {port.name: port.message for port in inputs}
        self.inboxes = {
            name: Inbox(has_tokens=all(has_tokens(port.message) for port in inputs if port.name == name))
            for name in names
        }
        self.output_types = {port.name: port.message.__name__ for port in outputs}
        self.outputs: Outputs = {}
        self.layers: list[tuple[Layer, Outputs]] = []
        self.outboxes: list[Outbox] = []
        self.routes: dict[type[Message], tuple[Put, ...]] = {}
        self.closed = False  # its requests are over and so is the stage: what comes for it is dropped
        self.failures = 0  # steps in a row that broke
        self.num_failed = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self.memory = 0  # bytes by which the process grew while the stage was opened
        self.timed = False  # something in the inboxes has a time of its making, or couldn't be taken
        self._lists = [inbox.messages for inbox in self.inboxes.values()]
        self._gates: list[FusedEdge | Outbox] = []
        self._only = next(iter(self.inboxes.values())) if len(self.inboxes) == 1 else None

    def add_output(self, output: FusedEdge | Outbox) -> None:
        self.outputs.setdefault(output.edge.message, []).append(output)
        if isinstance(output, Outbox):
            self.outboxes.append(output)
            self._count_tokens(output)
        if self._holds_up(output):
            self._gates.append(output)

    def _count_tokens(self, output: Outbox) -> None:
        """Tokens are counted as they come in; where what comes in has none, as they go out."""
        output.counts_tokens = has_tokens(type_registry.get(output.edge.message)) and not any(
            inbox.has_tokens for inbox in self.inboxes.values()
        )

    def _holds_up(self, output: FusedEdge | Outbox) -> bool:
        """Whether this stage waits while the edge is full. Where arm B branches off, A doesn't wait for it."""
        return not output.edge.back and (self.plan.arm == "b" or output.edge.arm != "b")

    def replace(self, outputs: Iterable[FusedEdge | Outbox]) -> None:
        """Sends to these outputs from now on, and so do the layers' requests, none of which is of arm B."""
        self.outputs = {}
        for output in outputs:
            self.outputs.setdefault(output.edge.message, []).append(output)
        self._regate()

    def fork(self, layer: Layer, outputs: Iterable[FusedEdge | Outbox]) -> None:
        """Sends to these outputs from now on, but requests of the layer where they went until now."""
        self.layers.append((layer, self.outputs))
        self.outputs = {}
        for output in outputs:
            self.outputs.setdefault(output.edge.message, []).append(output)
        self._regate()

    def join(self, layer: Layer) -> None:
        """Forgets the outputs of a layer that has drained."""
        self.layers = [(other, outputs) for other, outputs in self.layers if other is not layer]
        self._regate()

    def _regate(self) -> None:
        ways = [self.outputs, *(outputs for _, outputs in self.layers)]
        edges = dict.fromkeys(edge for outputs in ways for group in outputs.values() for edge in group)
        self._gates = [edge for edge in edges if self._holds_up(edge)]
        self.outboxes = [edge for edge in edges if isinstance(edge, Outbox)]
        for outbox in self.outboxes:
            self._count_tokens(outbox)
        self.routes.clear()

    @property
    def gated(self) -> bool:
        """True while an output is full. A back edge never gates: its consumer waits for this very stage."""
        for output in self._gates:  # noqa: SIM110 - any() over a generator costs 0.3 us more, several times a turn
            if output.full:
                return True
        return False

    @property
    def runnable(self) -> bool:
        """True when `step` has something to do and room for what it gives.

        The api is stepped even while its calls are full: texts must reach clients, new requests their refusal.
        """
        for messages in self._lists:
            if messages:
                if self._is_api or not self.gated:
                    return True
                self._note_stay()
                return False
        return self.stage.busy and (self._is_api or not self.gated)

    @property
    def waits(self) -> bool:
        """True when nothing is to be done before something arrives."""
        if not self._is_api:
            return not self.runnable
        return not any(self._lists) and (not self.stage.busy or self.gated)

    def take(self) -> tuple[list[list[Message]], list[Debt]]:
        """The inputs of one step, in the order of its parameters, and the debts that they settle."""
        if self.timed:
            self._note_waits()
        if self._only is not None:
            messages, settled = self._only.take()
            return [messages], settled
        inputs: list[list[Message]] = []
        debts: list[Debt] = []
        for inbox in self.inboxes.values():
            messages, settled = inbox.take()
            inputs.append(messages)
            debts += settled
        return inputs, debts

    def probe(self, port: str, began: float) -> None:
        """The message that was last received here was made then."""
        inbox, now = self.inboxes[port], self.context.clock.now()
        if inbox.messages:
            inbox.probes.append(began)
            self.timed = True
        else:
            inbox.waits.observe(max(0.0, now - began))

    def _note_stay(self) -> None:
        self.timed = True
        for inbox in self.inboxes.values():
            inbox.waits.stay(len(inbox.messages), self.context.clock.now())

    def _note_waits(self) -> None:
        self.timed = False
        now = self.context.clock.now()
        for inbox in self.inboxes.values():
            if inbox.probes:
                for began in inbox.probes:
                    inbox.waits.observe(max(0.0, now - began))
                inbox.probes.clear()
                inbox.waits.stays.clear()  # between workers, the sample speaks for all
            else:
                inbox.waits.leave(now)

    def full(self, output: str) -> bool:
        """True while an edge of this output port is full; that of an arm B that branches off here doesn't count."""
        edges = self.outputs.get(self.output_types.get(output, ""), ())
        return any(edge.full for edge in edges if self.plan.arm == "b" or edge.edge.arm != "b")

    def outbox_of(self, output: str, arm: str = "a") -> Outbox | None:
        """The outbox of an output port for messages of this arm, None when their edge stays in the worker."""
        for edge in self.outputs.get(self.output_types.get(output, ""), ()):
            if isinstance(edge, Outbox) and edge.edge.arm in ("", arm):
                return edge
        return None

    def edges_for(self, kind: type[Message], outputs: Outputs | None = None) -> list[FusedEdge | Outbox]:
        """The edges that take a message of this class: those of its own name, else of its nearest base."""
        outputs = self.outputs if outputs is None else outputs
        for cls in kind.__mro__:
            if cls.__name__ in outputs:
                return outputs[cls.__name__]
        return []


def request_ids(messages: Iterable[Message]) -> list[str]:
    """Ids of all requests that these messages speak of."""
    ids: list[str] = []
    for message in messages:
        found: Any = message
        if hasattr(message, "id"):
            ids.append(found.id)
        elif hasattr(message, "ids"):
            ids.extend(found.ids)
        elif hasattr(message, "pieces"):
            ids.extend(piece.id for piece in found.pieces)
    return ids
