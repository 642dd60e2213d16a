"""Senders that write into a taker's pool by themselves: queues and tickets over links. Moves no bytes itself.

Making a link may take seconds, so it happens in the background, and what is pushed meanwhile waits. A link that fails
is dropped and made anew for the next request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowinfer.errors import FlowInferError
from flowinfer.message import Ids
from flowinfer.transfer.links import Copying, Links
from flowinfer.transfer.transport import Push, Stopped, TransferError, Written

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

log = logging.getLogger(__name__)
PATIENCE_S = 0.002  # for the last blocks of a request: 600 MB take 0.3 ms within an H200


@dataclass
class _Queued:
    """Blocks that wait for their link."""

    ticket: int
    first: int
    ids: Ids
    mark: Any


@dataclass
class _UnderWay:
    ticket: int
    first: int
    ids: Ids
    taker: _Taker
    copying: Copying


@dataclass(eq=False)
class _Taker:
    """One life of a worker to which we write. link None: it is being made.  gone: nobody wants to hear of it."""

    name: str
    generation: int
    link: Any = None
    num_blocks: int = 0
    gone: bool = False
    broken: bool = False
    queue: deque[_Queued] = field(default_factory=deque)


class LinkSender:
    """The owner's half. Everything is for the worker's loop; what may take long runs in its thread pool."""

    def __init__(self, engine: Engine, links: Links) -> None:
        self.engine, self.links = engine, links
        self._takers: dict[str, _Taker] = {}
        self._dead: dict[str, int] = {}  # the last generation of each taker that is gone
        self._under_way: list[_UnderWay] = []
        self._ending: dict[int, str] = {}  # tickets that end with what is under way of them, and why; "": cancelled
        self._news: deque[Written | Stopped] = deque()

    # --------------------------------------------------------------------------------------------------- the contract

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        taker = self._taker_of(push)
        if not len(sources):
            return  # only the link was wanted
        targets = np.asarray(push.targets[first : first + len(sources)], np.int32)
        if len(targets) and not 0 <= targets.min() <= targets.max() < taker.num_blocks:
            raise TransferError(f"{push.to} asks for blocks {targets.tolist()}, which its pool doesn't have.")
        ids = np.stack([targets, np.asarray(sources, np.int32)], 1)
        taker.queue.append(_Queued(push.ticket, first, ids, self.links.mark()))
        self._start(taker)
        if last:
            self._be_patient(push.ticket)

    @property
    def pending(self) -> bool:
        return bool(self._under_way or self._news or any(taker.queue for taker in self._takers.values()))

    def progress(self) -> Sequence[Written | Stopped]:
        self._look()
        news, self._news = list(self._news), deque()
        return news

    def cancel(self, ticket: int) -> bool:
        self._look()
        for taker in self._takers.values():
            taker.queue = deque(queued for queued in taker.queue if queued.ticket != ticket)
        self._news = deque(news for news in self._news if news.ticket != ticket)
        if all(copy.ticket != ticket for copy in self._under_way):
            self._ending.pop(ticket, None)
            return True
        self._ending.setdefault(ticket, "")
        return False

    def forget(self, to: str) -> None:
        self._look()
        taker = self._takers.pop(to, None)
        if taker is not None:
            self._dead[to] = taker.generation
            taker.gone = True
            taker.queue.clear()
        for copy in self._under_way:
            if copy.taker.name == to:
                copy.taker.gone = True
                self._ending.pop(copy.ticket, None)
        if taker is not None:
            self._take_down(taker)

    def close(self) -> None:
        for copy in self._under_way:
            copy.copying.synchronize()
        takers = {id(taker): taker for taker in (*self._takers.values(), *(copy.taker for copy in self._under_way))}
        self._under_way.clear()
        for taker in takers.values():
            taker.gone = True
            if taker.link is not None:
                self.links.close(taker.link)
        self._takers.clear()

    # ---------------------------------------------------------------------------------------------------------- links

    def _taker_of(self, push: Push) -> _Taker:
        """The taker, whose link may still be being made. Raises TransferError for one that can't be reached."""
        taker = self._takers.get(push.to)
        if taker is not None and taker.generation == push.generation:
            return taker
        if push.generation <= max(self._dead.get(push.to, 0), taker.generation if taker is not None else 0):
            raise TransferError(f"{push.to} of generation {push.generation} is gone.")
        self.forget(push.to)
        address = self.links.read(push)
        if address.block_bytes != self.engine.layout.block_bytes:
            wanted, got = self.engine.layout.block_bytes, address.block_bytes
            raise TransferError(f"blocks of {push.to} have {got} bytes, and ours {wanted}.")
        taker = self._takers[push.to] = _Taker(push.to, push.generation, num_blocks=address.num_blocks)
        self.engine.ctx.submit(partial(self.links.open, address), partial(self._opened, taker))
        return taker

    def _opened(self, taker: _Taker, result: Any) -> None:
        if isinstance(result, BaseException):
            self._break(taker, result.message if isinstance(result, FlowInferError) else str(result))
            return
        taker.link = result
        if taker.gone:
            self._take_down(taker)
        else:
            self._start(taker)

    def _break(self, taker: _Taker, reason: str) -> None:
        """The link can't be made, or has failed: its tickets end, and the next request makes another one."""
        if taker.broken:
            return
        taker.broken = True
        if self._takers.get(taker.name) is taker:
            del self._takers[taker.name]
        if not taker.gone:
            log.warning("%s can't be written to: %s", taker.name, reason)
            under_way = dict.fromkeys(copy.ticket for copy in self._under_way if copy.taker is taker)
            for ticket in under_way:
                self._ending.setdefault(ticket, reason)
            waiting = dict.fromkeys(queued.ticket for queued in taker.queue)
            self._news.extend(Stopped(ticket, reason) for ticket in waiting if ticket not in under_way)
        taker.queue.clear()
        self._take_down(taker)

    def _take_down(self, taker: _Taker) -> None:
        """Once nothing is under way by its link."""
        if taker.link is None or any(copy.taker is taker for copy in self._under_way):
            return
        link, taker.link = taker.link, None
        self.engine.ctx.submit(partial(self.links.close, link), partial(_taken_down, taker.name))

    # -------------------------------------------------------------------------------------------------------- copying

    def _start(self, taker: _Taker) -> None:
        while taker.link is not None and taker.queue:
            queued = taker.queue[0]
            try:
                copying = self.links.copy(taker.link, queued.ids, queued.mark)
            except FlowInferError as error:
                self._break(taker, error.message)
                return
            taker.queue.popleft()
            self._under_way.append(_UnderWay(queued.ticket, queued.first, queued.ids, taker, copying))

    def _look(self) -> None:
        """Which copies are done, and which failed."""
        for copy in list(self._under_way):
            try:
                if not copy.copying.query():
                    continue
            except TransferError as error:
                self._under_way.remove(copy)
                self._failed(copy, error.message)
                continue
            self._under_way.remove(copy)
            if not copy.taker.gone and copy.ticket not in self._ending:
                self._news.append(Written(copy.ticket, copy.first, self.links.checks(copy.ids)))
            self._ended(copy)

    def _failed(self, copy: _UnderWay, reason: str) -> None:
        if not copy.taker.gone:
            self._ending.setdefault(copy.ticket, reason)
        self._break(copy.taker, reason)
        self._ended(copy)

    def _ended(self, copy: _UnderWay) -> None:
        """Tells the end of a ticket whose last copy this was, and takes down a link that was only kept for it."""
        if copy.taker.gone or copy.taker.broken:
            self._take_down(copy.taker)
        if copy.ticket in self._ending and all(other.ticket != copy.ticket for other in self._under_way):
            self._news.append(Stopped(copy.ticket, self._ending.pop(copy.ticket)))

    def _be_patient(self, ticket: int) -> None:
        """Waits for what somebody waits for, if it takes no longer than telling of it later would."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self._look()
            if all(copy.ticket != ticket for copy in self._under_way):
                return


def _taken_down(name: str, result: Any) -> None:
    if isinstance(result, BaseException):
        log.warning("the link to %s can't be taken down: %s", name, result)
