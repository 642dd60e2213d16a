"""The receiving half of a KV edge: takes over sequences whose KV another worker (or this one) has computed.

Grants its producers credit in KV blocks before they start, so that no prompt computes KV that has nowhere to go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from flowinfer.errors import RequestError
from flowinfer.message import Event, KVData, KVHandle, KVRelease, Message, Sequence, WorkerDown
from flowinfer.observe import metrics
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.units import Duration

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.transfer.receiver import Receiver


class KVTransfer(Stage):
    """Brings the KV of a prefilled sequence to the worker that decodes it."""

    kind = "kv-transfer"
    listens = (KVData, WorkerDown)

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
        from flowinfer.transfer.receiver import FrameReceiver, LeaseReceiver, LocalReceiver

        self.engine = Engine.of(self.ctx, self.config.model, self.config.dtype)
        self.engine.on_release.append(lambda request: self.ctx.give_back("sequences", request))
        frames: Receiver = FrameReceiver(self.engine)
        self.receivers: dict[str, Receiver] = {
            "local": LocalReceiver(),
            "shm": LeaseReceiver(self.engine),
            "tcp": frames,
        }
        self.coming: dict[str, tuple[KVHandle, float]] = {}
        self.ctx.offer("sequences", self.engine.pool.num_blocks)

    def step(self, sequences: list[Sequence]) -> Iterable[Sequence]:
        """Passes on what can be decoded at once; starts the transfer of the rest."""
        for sequence in sequences:
            try:
                if self._accept(sequence):
                    yield sequence
            except RequestError as error:
                self._refuse(sequence, error)

    def observe(self, event: Event) -> Iterable[Message] | None:
        """A block that arrived may complete a sequence; the death of a sender fails what it was sending."""
        if isinstance(event, KVData):
            sequence = self.receivers["tcp"].receive(event)
            if sequence is not None:
                self._count("tcp", *self.coming.pop(sequence.id))
                return [sequence]
        elif isinstance(event, WorkerDown):
            for request in [id for id, (handle, _) in self.coming.items() if handle.owner == event.worker]:
                self._abort(request, f"worker {event.worker} died while its KV was on the way")
        return None

    def cancel(self, requests: Collection[str]) -> None:
        """Drops transfers under way; their owner learns that it may free the blocks."""
        for request in requests:
            if self.coming.pop(request, None):
                self._drop(request)

    def _accept(self, sequence: Sequence) -> bool:
        handle = sequence.kv
        assert handle is not None, "the checker lets only sequences with a kv facet through"
        began = self.ctx.clock.now()
        if handle.layout != self.engine.layout.digest:
            raise RequestError(
                500, f"KV of layout {handle.layout} can't be decoded with layout {self.engine.layout.digest}."
            )
        transport = self._transport(handle)
        if self.receivers[transport].accept(sequence, handle):
            self._count(transport, handle, began)
            return True
        self.coming[sequence.id] = (handle, began)
        self.ctx.call_at(self.ctx.clock.now() + self.config.deadline, lambda: self._late(sequence.id, handle))
        return False

    def _refuse(self, sequence: Sequence, error: RequestError) -> None:
        assert sequence.kv is not None, "only sequences with KV are accepted"
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

    def _late(self, request: str, handle: KVHandle) -> None:
        if request in self.coming and self.coming[request][0] is handle:
            self._abort(
                request, f"KV of {handle.owner} didn't arrive at {self.ctx.worker} in {self.config.deadline:g} s"
            )

    def _abort(self, request: str, reason: str) -> None:
        del self.coming[request]
        self._drop(request)
        metrics.counter("transfer_failures_total").labels(reason="late_or_dead").inc()
        self.ctx.fail(request, RequestError(503, f"Edge into {self.ctx.stage}: {reason}.", code="kv_transfer"))

    def _count(self, transport: str, handle: KVHandle, began: float) -> None:
        if transport != "local":
            size = self.engine.layout.blocks_for(handle.num_tokens) * self.engine.layout.block_bytes
            metrics.counter("transfer_bytes_total").labels(transport=transport).inc(size)
            metrics.histogram("transfer_seconds").labels(transport=transport).observe(self.ctx.clock.now() - began)

    def _drop(self, request: str) -> None:
        self.receivers["tcp"].cancel(request)
        self.engine.release(request)
