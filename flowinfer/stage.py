"""The contract of a stage: settings, ports, facets, and the context that the worker hands it. Never imports torch.

A stage turns a batch of messages into messages. Its ports are the annotations of `step`: each parameter is an input
(`prompts: list[Prompt]`), each member of the returned `Iterable[A | B]` an output. Construction is cheap, `open()`
loads, `step()` works and never blocks.
"""

from __future__ import annotations

import re
import socket
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.message import Event, Message

if TYPE_CHECKING:
    from flowinfer.engine.layout import KVLayout

Result = TypeVar("Result")
Shared = TypeVar("Shared")
Unit = Literal["messages", "blocks"]
# How a change of a setting reaches a running service. live: `reconfigure` takes it between two steps. warm: a new
# instance is built beside the old one. cold: the service pauses for it. refused: only a new start brings it.
ChangeClass = Literal["live", "warm", "cold", "refused"]


class StageConfig(BaseModel):
    """Base of a stage's settings: unknown keys are errors, values don't change. Give units by flowinfer.units types."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def contract(self) -> Contract:
        """What the stage needs and gives with these settings. Override where it needs or adds anything."""
        return Contract()


def setting(default: Any, *, change: ChangeClass, **checks: Any) -> Any:
    """A setting that says how a running service takes a change of it; without, a setting is `warm`.

    checks are those of pydantic.Field, as in `ge=1`. For `live`, the stage overrides `reconfigure`.
    """
    return Field(default, json_schema_extra={"change": change}, **checks)


def change_class(config: type[StageConfig], name: str) -> ChangeClass:
    """How a change of this setting reaches a running service; `name` as files write it."""
    fields = config.model_fields
    found = fields.get(name) or next((field for field in fields.values() if field.alias == name), None)
    extra = found.json_schema_extra if found else None
    declared: Any = extra.get("change", "warm") if isinstance(extra, dict) else "warm"
    return cast(ChangeClass, declared)


@dataclass(frozen=True)
class ModelUse:
    """The model that a stage loads, as the file names it. weights=False: only tokenizer, template, configuration.

    packed: as the stage's setting `weights` says.  kv: as `kv_dtype` does.
    """

    model: str
    weights: bool = False
    dtype: str = "auto"
    packed: str = "checkpoint"
    kv: str = "auto"


@dataclass(frozen=True)
class Conflict:
    """A setting of this stage that can't stand beside a setting of another stage in the same graph."""

    setting: str  # of this stage, as in "draft"
    kind: str  # of the other stage
    other: str  # setting of the other stage
    values: tuple[object, ...]  # its values that conflict
    reason: str


@dataclass(frozen=True)
class Fit:
    """A setting of this stage that must suit the model of the stages of another kind.

    check takes the model as the file names it and gives what is wrong and what would do, or None. It is called at check
    time: it imports no torch and fetches nothing.  instead: a value of the setting that suits any model.
    """

    setting: str  # of this stage, as in "draft"
    kind: str  # of the other stage
    check: Callable[[str], tuple[str, str] | None]
    instead: str = ""


@dataclass(frozen=True)
class Contract:
    """What a stage asks of a graph. The checker reads it without opening anything.

    needs: facets that messages of an input port must carry, by port.  adds, drops: facets that outputs gain or lose.
    held: input ports whose credit the stage gives back itself (`ctx.give_back`), since it keeps messages for long.
    units: unit of credit by input port where it isn't messages.  beside: kinds that must run in the same worker.
    reserves: the stage takes credit of its output edge with `ctx.reserve` before it works on a message.
    reads: kinds whose settings the stage takes by `ctx.settings_of`, so that an arm with others needs one of its own.
    on_gpu: what a person should know of these settings where the stage runs on a GPU; `check` says it.
    """

    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    adds: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    model: ModelUse | None = None
    held: frozenset[str] = frozenset()
    units: Mapping[str, Unit] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    reserves: bool = False
    reads: frozenset[str] = frozenset()
    conflicts: tuple[Conflict, ...] = ()
    fits: tuple[Fit, ...] = ()
    on_gpu: str = ""


@dataclass(frozen=True)
class Port:
    """One input (named after its parameter) or output (named after its message, `Tokens` -> `tokens`) of a stage."""

    name: str
    message: type[Message]


class Clock(Protocol):
    """Time as a value, so that a test or the simulator can live through days in a millisecond."""

    def now(self) -> float:
        """Seconds of a monotonic clock that all processes of this host share."""

    def wall(self) -> float:
        """Seconds since 1970, for what must outlive the host's uptime."""


@dataclass(frozen=True)
class Arena:
    """Block memory of one KV layout. All CPU workers of a host map the same bytes and allocate from their own range.

    buffer holds num_blocks blocks of layout.block_bytes each; this worker owns ids first_block to end_block, exclusive.
    quarantined: ids of that range that another worker still reads from this worker's dead predecessor; each becomes
    free when a KVRelease names its request.  shared: other workers see the same bytes.  On a GPU the buffer is empty,
    and num_blocks 0 means as many as fit device_share of its memory beside the weights.
    """

    buffer: memoryview
    num_blocks: int
    first_block: int
    end_block: int
    shared: bool = False
    quarantined: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # by request id; lessee, ids
    device_share: float = 0.0


class Context(Protocol):
    """What a stage may use of its worker. Not thread-safe: only for the worker's loop, except inside `submit`."""

    stage: str  # name in the file
    worker: str  # instance, as in "prefill.0"
    generation: int  # rises each time the worker is started again
    device: str  # "cpu", "cuda:0"
    threads: int
    kernels: str  # with batch_invariant, the kernel set that makes blocks equal; else ""
    clock: Clock
    listener: socket.socket | None  # the service's listening socket, in the front worker

    def submit(
        self,
        fn: Callable[[], Result],
        then: Callable[[Result | BaseException], Iterable[Message] | None],
        *,
        request: str = "",
    ) -> None:
        """Runs fn in a small thread pool; `then` runs in the loop with its result or error, and may return messages.

        request: whose work it is, so that it fails at once if `then` raises. Without it, the requests of the step that
        asked for it do, as far as they are still open.
        """

    def call_at(self, when: float, fn: Callable[[], Iterable[Message] | None], *, request: str = "") -> None:
        """Runs fn in the loop once clock.now() reaches `when`. request: as in `submit`."""

    def fail(self, request: str, error: RequestError) -> None:
        """Ends a request with an error that its client gets. Frees nothing: the stage has done so."""

    def wake(self) -> None:
        """Makes the loop call `step` of this stage if it is busy. The only method that other threads may call."""

    def full(self, output: str) -> bool:
        """True while the edges of this output port can't take more: what is sent now would wait, not be lost."""

    def give_back(self, port: str, request: str) -> None:
        """Returns the credit of a `held` port that the message of this request took; it has left the stage."""

    def offer(self, port: str, amount: int) -> None:
        """Raises the credit granted on an input port; for `open`, once the stage knows its capacity."""

    def reserve(self, output: str, request: str, amount: int) -> str | None:
        """Takes `amount` of credit for `request` on the edge of this output port and binds it to one consumer instance.

        Returns that instance's name, or None when no consumer has that much: ask again on a later step. The message
        sent later for this request uses it; `unreserve` returns it when the request dies first. On an edge inside the
        worker it is free and always granted: the name is this worker's own.
        """

    def unreserve(self, output: str, request: str) -> None:
        """Returns what `reserve` took; harmless when it took nothing."""

    def send(self, event: Event, to: str | None = None) -> None:
        """Sends a control event to one worker instance, or to all (this one included, after this step)."""

    def instances(self, kind: str) -> list[str]:
        """Other live workers that run a stage of this kind and take new requests."""

    def take_over(self, request: str, *, shared: bool = False) -> bool:
        """Says that this worker holds a request that came by an event; False, and nothing is done, if it's over.

        shared: the worker that had it does still, until that one says `hand_on`.
        """

    def hand_on(self, request: str, to: str = "") -> None:
        """Says that the request goes on in another worker. `to`: in which, unless that one has said so itself."""

    def is_over(self, request: str) -> bool:
        """True once a request has had its end: what comes for it is late."""

    def shared(self, key: object, make: Callable[[], Shared], *, arms: bool = False) -> Shared:
        """The object of this key that the stages of this worker share (an engine, say), made on first use.

        Arm B of an experiment has objects of its own, but with `arms` (weights, say).
        """

    def settings_of(self, kind: str) -> list[dict[str, Any]]:
        """The settings of the graph's stages of this kind, as JSON values, for what is written once for several."""

    def still_closing(self, doing: str, since: float) -> bool:
        """For `close`, while it does what may take long: says so, and whether there is time left.

        Ask several times a second. since: when it began, by the clock. A worker that stops has serve.stop_timeout for
        all of its stages; where a change replaces stages and the worker goes on, each has three seconds.
        """

    def arena(self, layout: KVLayout) -> Arena:
        """The block memory that the plan set aside for this worker and layout."""


class Stage:
    """Base of all stages. Subclasses define Config, step, and where they hold anything, busy, cancel and close."""

    Config: ClassVar[type[StageConfig]] = StageConfig
    kind: ClassVar[str] = ""
    listens: ClassVar[tuple[type[Event], ...]] = ()

    def __init__(self, config: Any, ctx: Context) -> None:
        self.config = config
        self.ctx = ctx

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" not in cls.__dict__:
            cls.kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()

    if not TYPE_CHECKING:

        def step(self, *inputs: list[Message]) -> Iterable[Message]:
            raise FlowInferError(f"{type(self).__name__} has no step().")

    @property
    def busy(self) -> bool:
        """True while the stage has work in hand and wants `step` again without waiting for a message."""
        return False

    def open(self) -> None:
        """Loads what the stage needs. Slow is fine; errors are shown with the stage and its place in the file."""

    def close(self) -> None:
        """Frees what `open` took."""

    def cancel(self, requests: Collection[str]) -> None:
        """Forgets these requests and frees what they hold. Unknown ids are normal."""

    def observe(self, event: Event) -> Iterable[Message] | None:
        """Takes a control event of a type in `listens`."""
        return None

    def reconfigure(self, config: Any) -> None:
        """Works by these settings from the next step on. Called between two steps, when only `live` settings differ.

        It must be quick and must not fail: the settings have been validated. `self.config` is replaced behind it.
        """
        raise FlowInferError(f"{type(self).__name__} takes no live changes.")

    def inherit(self, before: Stage) -> None:
        """Copies what a new instance should know (an index, say) from the one of its class that it replaces.

        Called in the loop before the new instance gets its first message; the old one still ends its own requests.
        """


def ports(stage: type[Stage]) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs of a stage, from the annotations of `step`. Raises FlowInferError where they don't say."""
    step = getattr(stage, "step")  # noqa: B009 -- its signature is the subclass's own, so the base declares none
    try:
        hints = get_type_hints(step)
    except Exception as error:
        raise FlowInferError(f"{stage.__name__}.step: its annotations can't be read: {error}") from error
    returned = hints.pop("return", None)
    inputs = tuple(Port(name, message) for name, hint in hints.items() for message in _members(stage, name, hint))
    if get_origin(returned) is None and returned is not type(None):
        raise FlowInferError(f"{stage.__name__}.step must return Iterable[SomeMessage], not {returned}.")
    outputs = () if returned is type(None) else tuple(Port(_snake(m), m) for m in _members(stage, "return", returned))
    return inputs, outputs


def _members(stage: type[Stage], name: str, hint: Any) -> tuple[type[Message], ...]:
    (inner,) = get_args(hint) or (hint,)
    members = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
    for member in members:
        if not (isinstance(member, type) and issubclass(member, Message)):
            raise FlowInferError(f"{stage.__name__}.step: {name} must be a list or Iterable of messages, not {hint}.")
    return members


def _snake(message: type[Message]) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", message.__name__).lower()
