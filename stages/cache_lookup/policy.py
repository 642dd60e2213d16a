"""Decides which prompts wait for a prefix that another prompt is computing. Knows no queues; time is an argument.

The first prompt that will compute a block leads it. A later one that shares the block waits until the block is stored,
its leader stops, or its own patience ends. Waiting can't go round in circles: a prompt waits for the deepest block that
it shares and leads only deeper ones, and a prompt that doesn't wait runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from flowinfer.cache.index import BlockIndex

HURRY = 8  # a prompt with an eighth of its leader's work goes by itself: the leader may queue among the long ones


@dataclass(eq=False)
class _Request:
    id: str
    names: Sequence[bytes]
    order: int
    deadline: float
    leads: set[bytes] = field(default_factory=set)
    awaited: bytes | None = None


class SharedPrefix:
    """Leaders and followers of blocks that aren't cached yet. All methods return ids that may go on, oldest first.

    The caller tells `index` about an event before it tells this.
    """

    def __init__(self, index: BlockIndex, wait_s: float) -> None:
        self.index = index
        self.wait_s = wait_s
        self._requests: dict[str, _Request] = {}  # that wait or lead
        self._leader: dict[bytes, _Request] = {}
        self._followers: dict[bytes, list[_Request]] = {}
        self._waiting: dict[str, _Request] = {}  # oldest first, so by deadline
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_led(self) -> int:
        """Blocks that some prompt is expected to compute."""
        return len(self._leader)

    def arrive(self, id: str, names: Sequence[bytes], now: float) -> bool:
        """Takes a prompt with these block names (chain hashes). True: it may go on; False: it waits."""
        self._num_arrived += 1
        request = _Request(id, names, self._num_arrived, now + self.wait_s)
        self._requests[id] = request
        return self._place(request)

    def stored(self, names: Iterable[bytes]) -> list[str]:
        """These blocks are cached now."""
        freed: list[_Request] = []
        for name in names:
            if leader := self._leader.pop(name, None):
                leader.leads.discard(name)
                self._tidy(leader)
            freed += self._followers.pop(name, ())
        return self._release(freed)

    def stop(self, ids: Collection[str]) -> list[str]:
        """These prompts ended, failed or were cancelled. The oldest follower of what they led takes the lead."""
        stopped = [request for id in ids if (request := self._requests.pop(id, None))]
        orphans: list[_Request] = []
        for request in stopped:
            self._unwait(request)
        for request in stopped:
            for name in request.leads:
                del self._leader[name]
                orphans += self._followers.pop(name, ())
        return self._place_again(orphans)

    def expire(self, now: float) -> list[str]:
        """Those that waited for wait_s go on. They take the lead, since their leader has shown how slow it is."""
        late: list[_Request] = []
        for request in self._waiting.values():
            if request.deadline > now:
                break
            late.append(request)
        for request in late:
            self._unwait(request)
            self._lead(request, over_others=True)
        return [request.id for request in late]

    # -------------------------------------------------------------------------------------------------------- placing

    def _place(self, request: _Request) -> bool:
        awaited = self._deepest_shared(request)
        if awaited is None or self._hurries(request, self._leader[awaited]):
            self._lead(request, over_others=True)
            self._tidy(request)
            return True
        request.awaited = awaited
        self._followers.setdefault(awaited, []).append(request)
        self._waiting[request.id] = request
        self._lead(request, over_others=False)
        return False

    def _deepest_shared(self, request: _Request) -> bytes | None:
        """The last block led by another prompt, before the first that is neither led by another nor cached."""
        deepest = None
        for name in request.names:
            leader = self._leader.get(name)
            if leader is not None and leader is not request:
                deepest = name
            elif leader is request or name not in self.index:
                break
        return deepest

    def _hurries(self, request: _Request, leader: _Request) -> bool:
        own = len(request.names) - self.index.num_leading(request.names)
        return own * HURRY <= len(leader.leads)

    def _lead(self, request: _Request, *, over_others: bool) -> None:
        for name in request.names:
            if name in self.index:
                continue
            leader = self._leader.get(name)
            if leader is not None and leader is not request:
                if not over_others:
                    continue
                leader.leads.discard(name)
                self._tidy(leader)
            self._leader[name] = request
            request.leads.add(name)

    # ------------------------------------------------------------------------------------------------------ releasing

    def _release(self, requests: list[_Request]) -> list[str]:
        requests.sort(key=lambda request: request.order)
        for request in requests:
            request.awaited = None
            del self._waiting[request.id]
            self._tidy(request)
        return [request.id for request in requests]

    def _place_again(self, orphans: list[_Request]) -> list[str]:
        """Finds each orphan a new leader, or lets it go on as one; its patience doesn't start anew."""
        orphans.sort(key=lambda request: request.order)
        for request in orphans:
            request.awaited = None
        released = []
        for request in orphans:
            if self._place(request):
                del self._waiting[request.id]
                released.append(request.id)
        return released

    def _unwait(self, request: _Request) -> None:
        if request.awaited is not None:
            followers = self._followers[request.awaited]
            followers.remove(request)
            if not followers:
                del self._followers[request.awaited]
            request.awaited = None
            del self._waiting[request.id]

    def _tidy(self, request: _Request) -> None:
        """Forgets a prompt that neither waits nor leads."""
        if request.awaited is None and not request.leads:
            self._requests.pop(request.id, None)
