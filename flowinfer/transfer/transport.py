"""The contract of transports: ways for blocks of KV from the pool of one worker into the pool of another.

A KV edge has an owner, in whose pool prefill computes, and a taker, in whose pool decode wants the blocks. Where both
can use the same memory nothing moves (`local`, `shm`): the taker adopts the owner's blocks, see `inplace`. All other
transports push: the owner writes, the taker never reads. What all of them share is done once, for the owner in
`outgoing`, for the taker in `incoming`:

1. The owner admits a prompt and sends KVOffer: how many blocks there will be, of which layout, by which `ways`.
2. The taker sets blocks of its pool aside and answers KVFetch: the way it chose, a ticket, those blocks, the `address`
   of its pool. Without room it doesn't answer, and asks when the sequence has come.
3. The owner calls `Sender.push` for blocks as prefill completes them, and for the rest when prefill has ended. What is
   pushed is final: it isn't written again before the request is released.
4. Blocks land. The taker checks each; when the last one is in place it sends KVRelease, and decode may begin.

A ticket names one transfer among all of the service; it comes back with all that belongs to the transfer, and what
comes with another is refused and counted. So a request may be tried again while blocks of a first try are under way.

To add a transport, write a module with two functions, `make_sender(engine) -> Sender` and
`make_receiver(engine) -> Receiver`, and enter it in `flowinfer.graph.transports`; `tcp` is an example. Both halves live
in the loop of their worker: no call may block, and none comes from another thread. They are made on first use and must
fail then, by TransferError with a reason and a way out, where the machine lacks what they need. Of the engine they use
`kv` (the arena tensor, [blocks, *layout.block_shape], contiguous), `layout`, `pool`, `model.device` and `ctx`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from flowinfer.errors import FlowInferError
from flowinfer.graph.transports import TRANSPORTS
from flowinfer.message import KVData, KVPushed

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


class TransferError(FlowInferError):
    """A transport can't do what is asked of it."""


class DamagedBlock(Exception):
    """What arrived isn't what was sent."""


@dataclass(frozen=True)
class Push:
    """What one taker asked for. targets[i] is the block of its pool for block i of the request.

    to, generation: the worker instance and which life of it; what a sender keeps of a taker, it keeps for this pair.
    address: what the taker's half of the transport says of its pool.
    """

    id: str
    ticket: int
    to: str
    generation: int
    address: bytes
    targets: Sequence[int]


class Written(NamedTuple):
    """Blocks `first` to `first + len(checks)`, exclusive, lie in the taker's pool. checks: xxh3_64 each, 0 for none."""

    ticket: int
    first: int
    checks: Sequence[int]


class Stopped(NamedTuple):
    """Nothing more of this ticket will be written. reason: why it failed, "" after `cancel`."""

    ticket: int
    reason: str = ""


class Sender(Protocol):
    """The owner's half of a transport that pushes; one an engine."""

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        """Starts to write blocks `sources` of our pool over push.targets[first:], and returns at once.

        The sources are final, but what was queued on the device before this call may still be writing them: copies on
        another stream wait for it. last: the request has no more, and somebody waits for these; with them, and only
        with them, a sender may wait up to 2 ms, for the worker's next step would hold up the news of them. Without any
        sources it makes ready for this taker, and says nothing of it.
        Raises TransferError when the taker can't be reached this way; then nothing of this ticket is under way.
        """

    @property
    def pending(self) -> bool:
        """True while `progress` will have something to say."""

    def progress(self) -> Sequence[Written | Stopped]:
        """What has happened since the last call. Called about each millisecond while `pending`, and after `push`.

        A sender whose blocks carry the news of themselves (tcp) has nothing to say of them. A failure ends its ticket.
        """

    def cancel(self, ticket: int) -> bool:
        """Gives up what of a ticket isn't written yet. True: nothing more will be; False: `progress` says when.

        Until then the taker keeps its blocks. The sources may be reused at once: nobody will believe what arrives.
        """

    def forget(self, to: str) -> None:
        """This taker died: drops its tickets, of which `progress` says nothing more, and what is open towards it."""

    def close(self) -> None:
        """Frees what the sender has."""


class Receiver(Protocol):
    """The taker's half of a transport that pushes; one an engine.

    is_written_to: the owner writes into our pool by itself. Then blocks of a transfer that is given up are only free
    when the owner has said KVStopped, or is dead.
    """

    is_written_to: bool

    def address(self) -> bytes:
        """What senders must know of our pool; registers its memory, once. At most a few KB."""

    def land(self, arrived: KVData | KVPushed, targets: Sequence[int]) -> Sequence[int]:
        """Takes what has arrived for blocks `targets` of our pool; returns the indices that are in place now.

        KVData brings the bytes; KVPushed says that they are there. Raises DamagedBlock where a check fails.
        """

    def close(self) -> None:
        """Frees what the receiver has."""


def make_sender(name: str, engine: Engine) -> Sender:
    """The owner's half of a transport that pushes. Raises TransferError where this machine can't."""
    return cast(Sender, _module(name).make_sender(engine))


def make_receiver(name: str, engine: Engine) -> Receiver:
    """The taker's half. Raises TransferError where this machine can't."""
    return cast(Receiver, _module(name).make_receiver(engine))


def _module(name: str) -> ModuleType:
    transport = TRANSPORTS[name]
    if not transport.is_there:
        extra = f" pip install 'flowinfer[{transport.extra}]' brings it." if transport.extra else ""
        raise TransferError(f"transport {name} isn't installed here.", help=extra.strip())
    return importlib.import_module(transport.module)
