"""The taker's half of what all transports that push share: which blocks are to come, from whom, and which are there.

The blocks of a request are set aside when its prompt is offered, before prefill has begun; they belong to the engine's
held KV of that request from then on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from flowinfer.engine.held import HeldKV
from flowinfer.message import KVData, KVFetch, KVHandle, KVOffer, KVPushed, KVRelease, KVStopped, Sequence
from flowinfer.observe import metrics
from flowinfer.transfer.transport import Receiver, make_receiver

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


@dataclass
class Arrival:
    """One request whose blocks are under way. missing: indices of those that aren't here. sequence: once it has come.

    first: blocks before were here.  began: by the clock, when it was asked for.  ways: those that may still be tried.
    is_damaged: a block came that isn't what was sent; nobody waits for it any more.  is_stopped: no more will come.
    """

    id: str
    owner: str
    generation: int
    way: str
    ways: list[str]
    num_tokens: int
    blocks: list[int]
    first: int
    ticket: int = 0
    began: float = 0.0
    missing: set[int] = field(default_factory=set)
    sequence: Sequence | None = None
    is_damaged: bool = False
    is_stopped: bool = False

    @property
    def num_leading(self) -> int:
        """Blocks from the start that are all here."""
        return min(self.missing, default=len(self.blocks))


class Incoming:
    """Transfers into one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arrivals: dict[str, Arrival] = {}
        self._receivers: dict[str, Receiver] = {}
        self._tickets = random.SystemRandom().getrandbits(48) << 14  # no two takers give out the same
        self._unsafe: dict[int, tuple[str, list[int]]] = {}  # by ticket: owner, and blocks that it may still write into

    def receiver(self, way: str) -> Receiver:
        """Our half of a transport. Raises TransferError where this machine can't."""
        if way not in self._receivers:
            self._receivers[way] = make_receiver(way, self.engine)
        return self._receivers[way]

    # -------------------------------------------------------------------------------------------------------- asking

    def open_way(self, owner: str, way: str) -> None:
        """Lets a worker that will compute prompts make ready to push to us."""
        ctx, address = self.engine.ctx, self.receiver(way).address()
        none = np.empty(0, np.int32)
        fetch = KVFetch(
            id="", to=ctx.worker, generation=ctx.generation, ticket=0, transport=way, blocks=none, address=address
        )
        ctx.send(fetch, to=owner)

    def prepare(self, offer: KVOffer, ways: list[str]) -> bool:
        """Sets blocks aside for a prompt and asks for them by the first of the ways. False: there's no room."""
        self.drop(offer.id)
        return self._begin(offer.id, offer.owner, offer.generation, offer.num_tokens, offer.names, ways)

    def expect(self, sequence: Sequence, handle: KVHandle, ways: list[str]) -> bool:
        """The sequence has come; its blocks may be here, under way, or not asked for yet. False: there's no room."""
        arrival = self.arrivals.get(sequence.id)
        if arrival is not None and not self._is_of(arrival, handle):
            self.drop(sequence.id)
            arrival = None
        if arrival is None:
            names = sequence.prefix.hashes if sequence.prefix and sequence.sampling.prompt_logprobs is None else []
            if not self._begin(sequence.id, handle.owner, handle.generation, handle.num_tokens, names, ways):
                return False
            arrival = self.arrivals[sequence.id]
        arrival.sequence = sequence
        held = self.engine.adopt(sequence, handle, blocks=arrival.blocks, leased=False)
        held.num_committed = arrival.first
        held.partial -= set(range(arrival.first))  # ours are whole
        return True

    def _is_of(self, arrival: Arrival, handle: KVHandle) -> bool:
        same = (arrival.owner, arrival.generation) == (handle.owner, handle.generation)
        return same and len(arrival.blocks) == self.engine.layout.blocks_for(handle.num_tokens)

    def _begin(
        self, id: str, owner: str, generation: int, num_tokens: int, names: list[bytes], ways: list[str]
    ) -> bool:
        layout, pool = self.engine.layout, self.engine.pool
        known = names[: num_tokens // layout.block_tokens]
        here = pool.acquire(list(takewhile(lambda name: not pool.is_partial(name), known)))  # it needn't come
        fresh = pool.allocate(layout.blocks_for(num_tokens) - len(here))
        if fresh is None:
            pool.release(here)
            return False
        arrival = Arrival(id, owner, generation, ways[0], ways[1:], num_tokens, here + fresh, len(here))
        self.arrivals[id] = arrival
        self.engine.held[id] = HeldKV(id=id, blocks=arrival.blocks)
        arrival.missing = set(range(len(here), len(arrival.blocks)))
        self._ask(arrival)
        return True

    def _ask(self, arrival: Arrival) -> None:
        ctx = self.engine.ctx
        self._tickets += 1
        arrival.ticket, arrival.began, arrival.is_stopped = self._tickets, ctx.clock.now(), False
        if not arrival.missing:
            return
        fetch = KVFetch(
            id=arrival.id,
            to=ctx.worker,
            generation=ctx.generation,
            ticket=arrival.ticket,
            transport=arrival.way,
            blocks=np.array(arrival.blocks, np.int32),
            first=arrival.num_leading,
            address=self.receiver(arrival.way).address(),
        )
        ctx.send(fetch, to=arrival.owner)

    # ------------------------------------------------------------------------------------------------------- arriving

    def land(self, event: KVData | KVPushed) -> Arrival | None:
        """Takes what has arrived; returns its transfer if that has all blocks now. Raises DamagedBlock."""
        arrival = self.arrivals.get(event.id)
        if arrival is None or arrival.ticket != event.ticket:
            self._refuse("ticket")
            return None
        if isinstance(event, KVData) and event.index not in arrival.missing:
            self._refuse("twice")
            return None
        arrival.missing -= set(self.receiver(arrival.way).land(event, arrival.blocks))
        return None if arrival.missing else arrival

    def stopped(self, event: KVStopped) -> Arrival | None:
        """The owner has stopped. Returns the transfer that won't be completed, if a sequence waits for it."""
        if event.ticket in self._unsafe:
            self.engine.pool.release(self._unsafe.pop(event.ticket)[1])
            return None
        arrival = self.arrivals.get(event.id)
        if arrival is None or arrival.ticket != event.ticket:
            return None
        arrival.is_stopped = True
        if event.reason and arrival.ways:  # another way may do
            arrival.way = arrival.ways.pop(0)
            self._ask(arrival)
            return None
        if arrival.sequence is not None:
            return arrival
        self._free(arrival)
        return None

    def complete(self, arrival: Arrival) -> Sequence:
        """All blocks are here and so is the sequence: the owner may free its blocks, ours enter the prefix cache."""
        assert arrival.sequence is not None, "a sequence that hasn't come isn't complete"
        del self.arrivals[arrival.id]
        held = self.engine.held[arrival.id]
        self.release_to_owner(held)
        self.engine.commit(held, arrival.sequence.history)
        return arrival.sequence

    def release_to_owner(self, held: HeldKV) -> None:
        """What the request holds here is ours alone from now on."""
        owner, held.owner = held.owner, None
        if owner is not None:
            self.engine.ctx.send(KVRelease(id=held.id, lessee=self.engine.ctx.worker), to=owner)

    # ------------------------------------------------------------------------------------------------------ giving up

    def give_up(self, arrival: Arrival, *, owner_is_dead: bool) -> Sequence:
        """The rest won't come: returns the sequence, which holds the leading blocks that are here and no others."""
        assert arrival.sequence is not None and arrival.sequence.kv is not None, "somebody waits for it"
        sequence, keep = arrival.sequence, arrival.num_leading
        del self.arrivals[arrival.id]
        held = self.engine.held[arrival.id]
        self._free_blocks(arrival, arrival.blocks[keep:])
        held.blocks = arrival.blocks[:keep]
        self.engine.prefixes.cut(held, keep)
        if owner_is_dead:
            held.owner = None
        self.release_to_owner(held)
        self.engine.commit(held, sequence.history)
        return sequence

    def drop(self, request: str) -> None:
        """Nobody wants the request any more; its owner learns it if it waits for our word."""
        if (arrival := self.arrivals.get(request)) is not None:
            self._free(arrival)

    def lost(self, owner: str, generation: int) -> list[Arrival]:
        """A worker died: frees what was to come from it, and returns the transfers that sequences wait for."""
        for ticket in [ticket for ticket, (of, _) in self._unsafe.items() if of == owner]:
            self.engine.pool.release(self._unsafe.pop(ticket)[1])
        gone = [a for a in self.arrivals.values() if a.owner == owner and a.generation <= generation]
        for arrival in gone:
            arrival.is_stopped = True
            if arrival.sequence is None:
                self._free(arrival)
        return [arrival for arrival in gone if arrival.sequence is not None]

    def close(self) -> None:
        """Frees what the receivers have."""
        for receiver in self._receivers.values():
            receiver.close()

    def _free(self, arrival: Arrival) -> None:
        del self.arrivals[arrival.id]
        held = self.engine.held[arrival.id]
        held.blocks = []
        self._free_blocks(arrival, arrival.blocks)
        if arrival.sequence is not None:
            self.engine.release(arrival.id)
        else:  # its credit isn't ours to give back: the sequence may just have come, by another transfer
            del self.engine.held[arrival.id]

    def _free_blocks(self, arrival: Arrival, blocks: list[int]) -> None:
        """Blocks that the owner may still write into stay out of use until it says that it has stopped."""
        if arrival.is_stopped or not arrival.missing or not self.receiver(arrival.way).is_written_to:
            self.engine.pool.release(blocks)
        else:
            self._unsafe[arrival.ticket] = (arrival.owner, blocks)

    def _refuse(self, reason: str) -> None:
        metrics.counter("transfer_refused_blocks_total").labels(reason=reason).inc()
