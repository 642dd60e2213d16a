"""The owner's half of what all transports that push share: who asked for which request, and how far it is written."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flowinfer.graph.transports import TRANSPORTS
from flowinfer.message import KVFetch, KVOffer, KVPushed, KVStopped, Prompt
from flowinfer.transfer.transport import Push, Sender, TransferError, Written, make_sender

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.held import HeldKV

log = logging.getLogger(__name__)
POLL_S = 0.001  # how often a sender that writes by itself is asked how far it is


@dataclass
class _Transfer:
    """num_pushed: leading blocks that the sender was given, or that the taker had."""

    push: Push
    sender: Sender
    num_pushed: int


class Outgoing:
    """Transfers out of one engine, at most one a request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._offered: dict[str, str] = {}  # prompts that aren't computed yet, and who will decode them
        self._transfers: dict[str, _Transfer] = {}
        self._stopping: dict[int, _Transfer] = {}  # by ticket: given up, but still being written
        self._senders: dict[str, Sender] = {}
        self._polling = False

    @cached_property  # looking for modules takes longer than an offer
    def ways(self) -> list[str]:
        """Names of the transports by which another worker can have what is held here, best first."""
        device = self.engine.model.device.type
        pushing = [way.name for way in TRANSPORTS.values() if way.moves and way.device in ("", device) and way.is_there]
        return ["shm", *pushing] if self.engine.shares_memory else pushing

    def offer(self, prompt: Prompt, num_tokens: int, taker: str) -> None:
        """Tells the worker that will decode a prompt of num_tokens of KV to come."""
        engine, reuses = self.engine, prompt.sampling.prompt_logprobs is None
        self._offered[prompt.id] = taker
        offer = KVOffer(
            id=prompt.id,
            owner=engine.ctx.worker,
            generation=engine.ctx.generation,
            layout=engine.layout.digest,
            num_tokens=num_tokens,
            ways=self.ways,
            traits=engine.layout.traits(),
            names=prompt.prefix.hashes if prompt.prefix is not None and reuses else [],
        )
        engine.ctx.send(offer, to=taker)

    def fetch(self, event: KVFetch) -> None:
        """Begins to push what a taker asks for; says KVStopped where it isn't, or is no longer, for that taker."""
        if not event.id:
            self._open_way(event)
            return
        held = self.engine.held.get(event.id)
        if held is None or event.to not in (held.lessee, self._offered.get(event.id)):
            self._tell_stopped(event.id, event.to, event.ticket)
            return
        push = Push(event.id, event.ticket, event.to, event.generation, event.address, event.blocks.tolist())
        try:
            sender = self._sender(event.transport)
        except TransferError as error:
            self._tell_stopped(event.id, event.to, event.ticket, str(error))
            return
        self._transfers[event.id] = _Transfer(push, sender, event.first)
        self.advance(held)

    def _open_way(self, event: KVFetch) -> None:
        """What the first request would wait for is done before it comes, if it can be."""
        try:
            push = Push("", event.ticket, event.to, event.generation, event.address, ())
            self._sender(event.transport).push(push, 0, (), last=False)
        except TransferError as error:
            log.info("no way to %s by %s yet: %s", event.to, event.transport, error)

    def advance(self, held: HeldKV) -> None:
        """Pushes the blocks that have become complete; the last one, half full as it may be, once it is lent."""
        transfer, layout = self._transfers.get(held.id), self.engine.layout
        if transfer is None:
            return
        is_lent = held.lessee == transfer.push.to
        complete = layout.blocks_for(held.num_computed) if is_lent else held.num_computed // layout.block_tokens
        first, end = transfer.num_pushed, min(complete, len(transfer.push.targets))
        if first >= end:
            return
        transfer.num_pushed = end
        try:
            transfer.sender.push(transfer.push, first, held.blocks[first:end], last=is_lent)
        except TransferError as error:
            self._stop(transfer, str(error))
            return
        self._progress(transfer.sender)

    def lend(self, held: HeldKV) -> None:
        """The request is computed, and what isn't under way yet may follow."""
        self._offered.pop(held.id, None)
        self.advance(held)

    def cancel(self, request: str) -> None:
        """The blocks of this request are about to be freed. Its taker is told: blocks of its own may wait for that."""
        self._offered.pop(request, None)
        transfer = self._transfers.pop(request, None)
        if transfer is None:
            return
        if transfer.sender.cancel(transfer.push.ticket):
            self._tell_stopped(request, transfer.push.to, transfer.push.ticket)
        else:
            self._stopping[transfer.push.ticket] = transfer
            self._poll()

    def lost(self, taker: str) -> None:
        """A worker died: nothing is pushed to it any more."""
        for sender in self._senders.values():
            sender.forget(taker)
        self._offered = {request: to for request, to in self._offered.items() if to != taker}
        self._transfers = {id: transfer for id, transfer in self._transfers.items() if transfer.push.to != taker}
        self._stopping = {id: transfer for id, transfer in self._stopping.items() if transfer.push.to != taker}

    def close(self) -> None:
        """Frees what the senders have. Stages that share the engine may each call it."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    # ------------------------------------------------------------------------------------------------------- progress

    def _sender(self, name: str) -> Sender:
        if name not in self._senders:
            self._senders[name] = make_sender(name, self.engine)
        return self._senders[name]

    def _progress(self, sender: Sender) -> None:
        by_ticket = {transfer.push.ticket: transfer for transfer in self._transfers.values()} | self._stopping
        for news in sender.progress():
            transfer = by_ticket.get(news.ticket)
            if transfer is None:
                continue
            if isinstance(news, Written):
                self._tell_written(transfer, news)
            else:
                self._stop(transfer, news.reason)
        if sender.pending:
            self._poll()

    def _poll(self) -> None:
        if not self._polling:
            self._polling = True
            self.engine.ctx.call_at(self.engine.ctx.clock.now() + POLL_S, self._ask)

    def _ask(self) -> None:
        self._polling = False
        for sender in list(self._senders.values()):
            if sender.pending:
                self._progress(sender)

    def _tell_written(self, transfer: _Transfer, news: Written) -> None:
        event = KVPushed(id=transfer.push.id, ticket=news.ticket, first=news.first, checks=list(news.checks))
        self.engine.ctx.send(event, to=transfer.push.to)

    def _stop(self, transfer: _Transfer, reason: str) -> None:
        push = transfer.push
        self._stopping.pop(push.ticket, None)
        if self._transfers.get(push.id) is transfer:
            del self._transfers[push.id]
        self._tell_stopped(push.id, push.to, push.ticket, reason)

    def _tell_stopped(self, request: str, taker: str, ticket: int, reason: str = "") -> None:
        self.engine.ctx.send(KVStopped(id=request, ticket=ticket, reason=reason), to=taker)
