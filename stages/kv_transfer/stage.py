"""The receiving half of a KV edge: takes over sequences whose KV another worker (or this one) has computed.

Grants its producers credit in KV blocks before they start, so that no prompt computes KV that has nowhere to go.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import (
    Event,
    HandOff,
    HandOffRefused,
    KVData,
    KVHandle,
    KVRelease,
    Message,
    Sequence,
    WorkerDown,
)
from flowinfer.observe import metrics
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.transfer.receiver import NoRoom
from flowinfer.transfer.transport import DamagedBlock
from flowinfer.units import Duration

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.transfer.receiver import Receiver

log = logging.getLogger(__name__)
RETRY_S = 0.005  # how soon a sequence that found no room asks again; a freed block isn't an event of its own


class KVTransfer(Stage):
    """Brings the KV of a prefilled sequence, or of a running one, to the worker that decodes it."""

    kind = "kv-transfer"
    listens = (KVData, WorkerDown, HandOff)

    class Config(StageConfig):
        """model, dtype: as in moe-decode, whose engine receives.

        transport: `shm` leases blocks of the host's shared arena, `tcp` copies them as frames, `auto` takes shm where
        both workers map one arena.  deadline: longest time for the blocks of one sequence to arrive.
        """

        model: str = setting("", change="cold")
        dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", change="cold")
        transport: Literal["auto", "shm", "tcp"] = setting("auto", change="cold")
        deadline: Duration = 30.0

        def contract(self) -> Contract:
            """The kv facet is needed and kept; credit is granted in blocks and comes back when decode has finished."""
            return Contract(
                needs={"sequences": frozenset({"kv"})},
                model=ModelUse(self.model, weights=True, dtype=self.dtype),
                held=frozenset({"sequences"}),
                units={"sequences": "blocks"},
                beside=frozenset({"moe-decode"}),
                reads=frozenset({"cache-lookup"}),
            )

    config: Config
    engine: Engine

    def open(self) -> None:
        """Loads the engine, if decode hasn't, and offers its blocks as credit."""
        from flowinfer.engine.engine import Engine
        from flowinfer.transfer.receiver import CopyReceiver, FrameReceiver, LeaseReceiver, LocalReceiver

        self.engine = Engine.of(self.ctx, self.config.model, self.config.dtype)
        for hook in (self.engine.on_release, self.engine.on_offer):
            hook.append(lambda request: self.ctx.give_back("sequences", request))
        self.frames = FrameReceiver(self.engine)
        self.receivers: dict[str, Receiver] = {
            "local": LocalReceiver(),
            "shm": LeaseReceiver(self.engine),
            "copy": CopyReceiver(self.engine),
            "tcp": self.frames,
        }
        self.coming: dict[str, tuple[KVHandle, float]] = {}
        self.crowded: dict[str, float] = {}  # sequences that found no room, and since when
        self.dead: dict[str, int] = {}  # last generation of each worker that died
        self.ctx.offer("sequences", self.engine.pool.num_blocks)

    def step(self, sequences: list[Sequence]) -> Iterable[Sequence]:
        """Passes on what can be decoded at once; starts the transfer of the rest."""
        for sequence in sequences:
            yield from self._receive(sequence)

    def observe(self, event: Event) -> Iterable[Message] | None:
        """A block that arrived may complete a sequence; what a sender that died hasn't sent is computed here."""
        if isinstance(event, KVData):
            try:
                sequence = self.frames.receive(event)
            except DamagedBlock as error:
                log.warning("%s: its KV is computed here instead", error)
                return list(self._go_on_without(event.id, "damaged"))
            if sequence is not None:
                self._count("tcp", *self.coming.pop(sequence.id))
                return [sequence]
        elif isinstance(event, HandOff):
            return self._take_up(event.sequence)
        elif isinstance(event, WorkerDown):
            self.dead[event.worker] = max(event.generation, self.dead.get(event.worker, 0))
            lost = [id for id, (handle, _) in self.coming.items() if handle.owner == event.worker]
            return [sequence for request in lost for sequence in self._go_on_without(request)]
        return None

    def cancel(self, requests: Collection[str]) -> None:
        """Drops transfers under way; their owner learns that it may free the blocks."""
        for request in requests:
            self.crowded.pop(request, None)
            if self.coming.pop(request, None):
                self._drop(request)

    def _receive(self, sequence: Sequence) -> Iterable[Sequence]:
        try:
            if self._accept(sequence):
                yield sequence
        except NoRoom as error:  # sequences that were handed off here took blocks that had been granted
            since = self.crowded.setdefault(sequence.id, self.ctx.clock.now())
            if self.ctx.clock.now() - since > self.config.deadline:
                self._refuse(sequence, error)
            else:
                self.ctx.call_at(self.ctx.clock.now() + RETRY_S, partial(self._retry, sequence), request=sequence.id)
        except RequestError as error:
            self._refuse(sequence, error)

    def _retry(self, sequence: Sequence) -> Iterable[Sequence]:
        return self._receive(sequence) if sequence.id in self.crowded else ()

    def _accept(self, sequence: Sequence) -> bool:
        handle = sequence.kv
        assert handle is not None, "the checker lets only sequences with a kv facet through"
        began = self.ctx.clock.now()
        if handle.layout != self.engine.layout.digest:
            raise RequestError(
                500, f"KV of layout {handle.layout} can't be decoded with layout {self.engine.layout.digest}."
            )
        transport = self._transport(handle)
        if handle.generation <= self.dead.get(handle.owner, 0) and transport != "local":
            self.engine.adopt(sequence, msgspec.structs.replace(handle, num_tokens=0), blocks=[], leased=False)
            self.engine.held[sequence.id].owner = None
            return True  # decode computes it: its blocks went with their owner
        complete = self.receivers[transport].accept(sequence, handle)
        self.crowded.pop(sequence.id, None)
        if complete:
            self._count(transport, handle, began)
            return True
        self._await(sequence, handle)
        return False

    def _await(self, sequence: Sequence, handle: KVHandle) -> None:
        now = self.ctx.clock.now()
        self.coming[sequence.id] = (handle, now)
        late = partial(self._late, sequence.id, handle)
        self.ctx.call_at(now + self.config.deadline, late, request=sequence.id)

    # ---------------------------------------------------------------------------- sequences that run already elsewhere

    def _take_up(self, sequence: Sequence) -> Iterable[Sequence]:
        """Takes a running sequence over from a worker that is about to go, or lets it keep it."""
        handle = sequence.kv
        assert handle is not None, "what is handed off has its KV"
        if not self._has_room(sequence, handle):
            self.ctx.send(HandOffRefused(id=sequence.id, by=self.ctx.worker), to=handle.owner)
            return
        if not self.ctx.take_over(sequence.id, shared=True):
            self.ctx.send(KVRelease(id=sequence.id, lessee=self.ctx.worker), to=handle.owner)
            return
        began = self.ctx.clock.now()
        transport = "tcp" if handle.transport == "tcp" or self.config.transport == "tcp" else "copy"
        if self.receivers[transport].accept(sequence, handle):
            self._count(transport, handle, began)
            yield sequence
        else:
            self._await(sequence, handle)

    def _has_room(self, sequence: Sequence, handle: KVHandle) -> bool:
        """True with blocks for the sequence and for the next token of each that is here: else it would only preempt."""
        if handle.layout != self.engine.layout.digest or sequence.id in self.engine.held or self.engine.starved:
            return False
        needed = self.engine.layout.blocks_for(len(sequence.history) + 1)
        return self.engine.pool.num_free >= needed + len(self.engine.held)

    def _go_on_without(self, request: str, reason: str = "late_or_dead") -> Iterable[Sequence]:
        """What was to come won't: the sequence is decoded all the same, and its KV computed here."""
        handle, _ = self.coming.pop(request)
        sequence = self.frames.abandon(request)
        metrics.counter("transfer_failures_total").labels(reason=reason).inc()
        if sequence is None:
            return
        if handle.generation > self.dead.get(handle.owner, 0):
            self.ctx.send(KVRelease(id=request, lessee=self.ctx.worker), to=handle.owner)
        held = self.engine.held[request]
        held.owner, held.num_computed, held.num_committed = None, 0, 0
        yield sequence

    def _refuse(self, sequence: Sequence, error: RequestError) -> None:
        assert sequence.kv is not None, "only sequences with KV are accepted"
        self.crowded.pop(sequence.id, None)
        if sequence.kv.owner == self.ctx.worker:
            self.engine.release(sequence.id)
        else:
            self.ctx.send(KVRelease(id=sequence.id, lessee=self.ctx.worker), to=sequence.kv.owner)
            self.ctx.give_back("sequences", sequence.id)
        self.ctx.fail(sequence.id, error)

    def _transport(self, handle: KVHandle) -> str:
        if handle.owner == self.ctx.worker:
            return "local"
        wanted = self.config.transport
        if wanted == "shm" and handle.transport != "shm":
            raise RequestError(500, f"{handle.owner} and {self.ctx.worker} share no memory: set transport: tcp.")
        return handle.transport if wanted == "auto" else wanted

    def _late(self, request: str, handle: KVHandle) -> Iterable[Sequence]:
        if request in self.coming and self.coming[request][0] is handle:
            yield from self._go_on_without(request)

    def _count(self, transport: str, handle: KVHandle, began: float) -> None:
        if transport != "local":
            size = self.engine.layout.blocks_for(handle.num_tokens) * self.engine.layout.block_bytes
            metrics.counter("transfer_bytes_total").labels(transport=transport).inc(size)
            metrics.histogram("transfer_seconds").labels(transport=transport).observe(self.ctx.clock.now() - began)

    def _drop(self, request: str) -> None:
        self.frames.cancel(request)
        self.engine.release(request)
