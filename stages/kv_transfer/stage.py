"""The receiving half of a KV edge: takes over sequences whose KV another worker (or this one) has computed.

Grants its producers credit in KV blocks before they start, so that no prompt computes KV that has nowhere to go, and
sets the blocks aside when it hears of a prompt, so that they are filled while prefill computes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
from pydantic import model_validator

from flowinfer.engine.formats import KVDtype, Weights
from flowinfer.errors import RequestError
from flowinfer.graph.transports import TRANSPORTS
from flowinfer.message import (
    Event,
    HandOff,
    HandOffRefused,
    KVData,
    KVHandle,
    KVOffer,
    KVPushed,
    KVRelease,
    KVStopped,
    Message,
    Sequence,
    WorkerDown,
    WorkerUp,
)
from flowinfer.observe import metrics
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.kv_transfer.policy import disagreement, early_way, ways_of
from flowinfer.transfer.transport import DamagedBlock, TransferError
from flowinfer.units import Duration

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.transfer.incoming import Arrival

log = logging.getLogger(__name__)
RETRY_S = 0.005  # how soon a sequence that found no room asks again; a freed block isn't an event of its own


class NoRoom(Exception):
    """There are no free blocks for a sequence now."""


class KVTransfer(Stage):
    """Brings the KV of a prefilled sequence, or of a running one, to the worker that decodes it."""

    kind = "kv-transfer"
    listens = (KVOffer, KVData, KVPushed, KVStopped, WorkerDown, WorkerUp, HandOff)

    class Config(StageConfig):
        """model, dtype, weights, kv_dtype: as in moe-decode, whose engine receives.

        transport: `shm` leases blocks of the host's shared arena, the others copy blocks from pool to pool: `tcp` as
        frames, `cuda_ipc` from GPU to GPU of one host, `nixl` by RDMA; `auto` takes the first that fits both workers,
        and never nixl.  interfaces: of the network, that nixl may use on every host, as in [mlx5_0:1] or [eth0].
        deadline: longest time for the blocks of one sequence to arrive after it has been computed.
        """

        model: str = setting("", change="cold")
        dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", change="cold")
        weights: Weights = setting("checkpoint", change="cold")
        kv_dtype: KVDtype = setting("auto", change="cold")
        transport: Literal["auto", "shm", "tcp", "cuda_ipc", "nixl"] = setting("auto", change="cold")
        interfaces: tuple[str, ...] = setting((), change="cold")
        deadline: Duration = 30.0

        @model_validator(mode="after")
        def _names_interfaces(self) -> KVTransfer.Config:
            if (self.transport == "nixl") != bool(self.interfaces):
                raise ValueError("transport: nixl and the `interfaces` that it may use, as in [eth0], go together")
            return self

        def contract(self) -> Contract:
            """The kv facet is needed and kept; credit is granted in blocks and comes back when decode has finished."""
            return Contract(
                needs={"sequences": frozenset({"kv"})},
                model=ModelUse(self.model, weights=True, dtype=self.dtype, packed=self.weights, kv=self.kv_dtype),
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
        from flowinfer.transfer.incoming import Incoming

        own = self.config
        self.engine = Engine.of(self.ctx, own.model, own.dtype, own.weights, own.kv_dtype)
        for hook in (self.engine.on_release, self.engine.on_offer):
            hook.append(lambda request: self.ctx.give_back("sequences", request))
        self.incoming = Incoming(self.engine)
        # An offer names no stage. Where several might be meant, blocks are asked for when the sequence has come.
        self.takes_offers = len(self.ctx.settings_of("kv-transfer")) <= 1
        self.unable: dict[str, str] = {}  # transports that this machine turned out not to have, and why
        if TRANSPORTS.get(self.config.transport, TRANSPORTS["shm"]).moves:
            self.incoming.receiver(self.config.transport)  # who asks for one by name hears now that it isn't there
        self.crowded: dict[str, tuple[Sequence, float]] = {}  # sequences that found no room, and since when
        self.dead: dict[str, int] = {}  # last generation of each worker that died
        self.ctx.offer("sequences", self.engine.pool.num_blocks)

    def close(self) -> None:
        """Lets go of what the transports took."""
        self.incoming.close()
        self.engine.outgoing.close()

    def step(self, sequences: list[Sequence]) -> Iterable[Sequence]:
        """Passes on what can be decoded at once; starts the transfer of the rest."""
        for sequence in sequences:
            yield from self._receive(sequence)

    def observe(self, event: Event) -> Iterable[Message] | None:
        """A block that arrived may complete a sequence; what a sender that died hasn't sent is computed here."""
        match event:
            case KVData() | KVPushed():
                return self._land(event)
            case KVOffer():
                self._prepare(event)
            case KVStopped():
                if arrival := self.incoming.stopped(event):
                    return self._go_on_without(arrival, "stopped", event.reason)
            case HandOff():
                return self._take_up(event.sequence)
            case WorkerUp():
                self._open_way(event.worker)
            case WorkerDown():
                self.dead[event.worker] = max(event.generation, self.dead.get(event.worker, 0))
                lost = self.incoming.lost(event.worker, event.generation)
                return [sequence for arrival in lost for sequence in self._go_on_without(arrival, "dead")]
        return None

    def _open_way(self, owner: str) -> None:
        way = early_way(self.config.transport, self.engine.model.device.type)
        if way and owner in self.ctx.instances("prefill") and self._is_able(way):
            self.incoming.open_way(owner, way)

    def cancel(self, requests: Collection[str]) -> None:
        """Drops transfers under way; their owner learns that it may free the blocks."""
        for request in requests:
            self.incoming.drop(request)
            if request in self.crowded:
                sequence, _ = self.crowded.pop(request)
                self._let_go(sequence)

    # ------------------------------------------------------------------------------------- prompts to come, and blocks

    def _prepare(self, offer: KVOffer) -> None:
        """Sets blocks aside for a prompt that is about to be computed, and asks for them."""
        if not self.takes_offers or self.ctx.is_over(offer.id) or offer.generation <= self.dead.get(offer.owner, 0):
            return
        arrival = self.incoming.arrivals.get(offer.id)
        if arrival.sequence is not None if arrival else offer.id in self.engine.held:
            return  # its sequence has come before: it travels by another lane
        if offer.layout != self.engine.layout.digest:
            metrics.counter("transfer_failures_total").labels(reason="layout").inc()
            mine = self.engine.layout.traits()
            self.ctx.fail(offer.id, RequestError(500, disagreement(offer.owner, offer.traits, self.ctx.worker, mine)))
            return
        ways = self._ways(offer.ways)
        if ways and TRANSPORTS[ways[0]].moves:
            self.incoming.prepare(offer, ways)  # without room, it's asked for when the sequence comes

    def _land(self, event: KVData | KVPushed) -> Iterable[Sequence]:
        try:
            arrival = self.incoming.land(event)
        except DamagedBlock as error:
            log.warning("%s", error)
            arrival = self.incoming.arrivals[event.id]
            arrival.is_damaged = True
            return self._go_on_without(arrival, "damaged") if arrival.sequence else ()
        return self._completed(arrival) if arrival is not None and arrival.sequence else ()

    def _completed(self, arrival: Arrival) -> Iterable[Sequence]:
        sequence = self.incoming.complete(arrival)
        assert sequence.kv is not None, "only sequences with KV are expected"
        num_bytes = (len(arrival.blocks) - arrival.first) * self.engine.layout.block_bytes
        self._count(arrival.way, num_bytes, arrival.began, sequence.kv)
        yield sequence

    # --------------------------------------------------------------------------------------------- computed sequences

    def _receive(self, sequence: Sequence) -> Iterable[Sequence]:
        try:
            yield from self._accept(sequence)
            self.crowded.pop(sequence.id, None)
        except NoRoom:  # sequences that were handed off here took blocks that had been granted
            _, since = self.crowded.setdefault(sequence.id, (sequence, self.ctx.clock.now()))
            if self.ctx.clock.now() - since > self.config.deadline:
                self._refuse(sequence, RequestError(503, "No room for the KV of this request.", code="kv_exhausted"))
            else:
                self.ctx.call_at(self.ctx.clock.now() + RETRY_S, partial(self._retry, sequence), request=sequence.id)
        except RequestError as error:
            self._refuse(sequence, error)

    def _retry(self, sequence: Sequence) -> Iterable[Sequence]:
        return self._receive(sequence) if sequence.id in self.crowded else ()

    def _accept(self, sequence: Sequence) -> Iterable[Sequence]:
        handle = sequence.kv
        assert handle is not None, "the checker lets only sequences with a kv facet through"
        if handle.layout != self.engine.layout.digest:
            raise RequestError(500, disagreement(handle.owner, {}, self.ctx.worker, self.engine.layout.traits()))
        if handle.owner == self.ctx.worker:
            yield sequence
        elif handle.generation <= self.dead.get(handle.owner, 0):
            self.incoming.drop(sequence.id)
            self.engine.adopt(sequence, msgspec.structs.replace(handle, num_tokens=0), blocks=[], leased=False)
            self.engine.held[sequence.id].owner = None
            yield sequence  # decode computes it: its blocks went with their owner
        else:
            yield from self._bring(sequence, handle, copy=False)

    def _bring(self, sequence: Sequence, handle: KVHandle, *, copy: bool) -> Iterable[Sequence]:
        """By the first way that both ends have. copy: the owner is about to go, so a lease won't do."""
        from flowinfer.transfer import inplace

        began = self.ctx.clock.now()
        ways = self._ways(handle.ways)
        if not ways:
            raise RequestError(500, self._no_way(handle))
        if TRANSPORTS[ways[0]].moves:
            yield from self._await(sequence, handle, ways)
        elif not copy:
            inplace.lease(self.engine, sequence, handle)
            self._count(ways[0], self._size(handle), began, handle)
            yield sequence
        elif inplace.copy(self.engine, sequence, handle):
            self._count("copy", self._size(handle), began, handle)
            yield sequence
        else:
            raise NoRoom

    def _await(self, sequence: Sequence, handle: KVHandle, ways: list[str]) -> Iterable[Sequence]:
        if not self.incoming.expect(sequence, handle, ways):
            raise NoRoom
        arrival = self.incoming.arrivals[sequence.id]
        if not arrival.missing:
            yield from self._completed(arrival)
        elif arrival.is_damaged:
            yield from self._go_on_without(arrival, "damaged")
        else:
            late = partial(self._late, arrival)
            self.ctx.call_at(self.ctx.clock.now() + self.config.deadline, late, request=sequence.id)

    def _late(self, arrival: Arrival) -> Iterable[Sequence]:
        if self.incoming.arrivals.get(arrival.id) is arrival:
            yield from self._go_on_without(arrival, "late")

    def _go_on_without(self, arrival: Arrival, reason: str, why: str = "") -> Iterable[Sequence]:
        """What was to come won't: the sequence is decoded all the same, and what is missing computed here."""
        metrics.counter("transfer_failures_total").labels(reason=reason).inc()
        log.warning(
            "%d of the %d KV blocks of request %s from %s are computed here instead: %s",
            len(arrival.blocks) - arrival.num_leading,
            len(arrival.blocks),
            arrival.id,
            arrival.owner,
            why or reason,
        )
        yield self.incoming.give_up(arrival, owner_is_dead=arrival.generation <= self.dead.get(arrival.owner, 0))

    def _refuse(self, sequence: Sequence, error: RequestError) -> None:
        assert sequence.kv is not None, "only sequences with KV are accepted"
        self.crowded.pop(sequence.id, None)
        metrics.counter("transfer_failures_total").labels(reason=error.code or "refused").inc()
        if sequence.kv.owner == self.ctx.worker:
            self.engine.release(sequence.id)
        else:
            self.incoming.drop(sequence.id)
            self._let_go(sequence)
        self.ctx.fail(sequence.id, error)

    def _let_go(self, sequence: Sequence) -> None:
        """The owner may free what it lent us, of which we hold nothing."""
        assert sequence.kv is not None, "only sequences with KV come"
        self.ctx.send(KVRelease(id=sequence.id, lessee=self.ctx.worker), to=sequence.kv.owner)
        self.ctx.give_back("sequences", sequence.id)

    # ---------------------------------------------------------------------------- sequences that run already elsewhere

    def _take_up(self, sequence: Sequence) -> Iterable[Sequence]:
        """Takes a running sequence over from a worker that is about to go, or lets it keep it."""
        handle = sequence.kv
        assert handle is not None, "what is handed off has its KV"
        if not self._has_room(sequence, handle):
            self.ctx.send(HandOffRefused(id=sequence.id, by=self.ctx.worker), to=handle.owner)
        elif not self.ctx.take_over(sequence.id, shared=True):
            self.ctx.send(KVRelease(id=sequence.id, lessee=self.ctx.worker), to=handle.owner)
        else:
            yield from self._bring(sequence, handle, copy=True)

    def _has_room(self, sequence: Sequence, handle: KVHandle) -> bool:
        """True with blocks for the sequence and for the next token of each that is here: else it would only preempt."""
        if handle.layout != self.engine.layout.digest or sequence.id in self.engine.held or self.engine.starved:
            return False
        needed = self.engine.layout.blocks_for(len(sequence.history) + 1)
        return bool(self._ways(handle.ways)) and self.engine.pool.num_free >= needed + len(self.engine.held)

    # ---------------------------------------------------------------------------------------------------------- ways

    def _ways(self, offered: list[str]) -> list[str]:
        """Those of the owner that this worker takes, best first."""
        return [way for way in ways_of(self.config.transport, offered) if self._is_able(way)]

    def _is_able(self, way: str) -> bool:
        if way in self.unable:
            return False
        if way == "shm":
            return self.engine.shares_memory
        try:
            self.incoming.receiver(way)
        except TransferError as error:
            self.unable[way] = str(error)
            log.warning("transport %s isn't used: %s", way, error)
            return False
        return True

    def _no_way(self, handle: KVHandle) -> str:
        mine, theirs = self.config.transport, ", ".join(handle.ways) or "none"
        return f"{handle.owner} can give KV by {theirs}, and {self.ctx.worker} takes it by {mine}: set transport: auto."

    def _size(self, handle: KVHandle) -> int:
        return self.engine.layout.blocks_for(handle.num_tokens) * self.engine.layout.block_bytes

    def _count(self, transport: str, num_bytes: int, began: float, handle: KVHandle) -> None:
        now = self.ctx.clock.now()
        metrics.counter("transfer_bytes_total").labels(transport=transport).inc(num_bytes)
        metrics.histogram("transfer_seconds").labels(transport=transport).observe(now - began)
        exposed = max(0.0, now - handle.computed_at)
        metrics.histogram("transfer_exposed_seconds").labels(transport=transport).observe(exposed)
