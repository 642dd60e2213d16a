"""Blocks that live for a fixed time after their last use. Pure: the time is an argument; holds no bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SlidingExpiry:
    """Names and when each was last used. O(1) a block; memory is what was used within ttl_s."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._used: OrderedDict[bytes, float] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return len(self._used)

    def num_leading(self, names: Sequence[bytes]) -> int:
        """How many leading blocks are still alive, as of the last `expire`."""
        return next((i for i, name in enumerate(names) if name not in self._used), len(names))

    def use(self, names: Sequence[bytes], now: float) -> None:
        """These blocks are used, so each lives until now + ttl_s."""
        for name in reversed(names):
            self._used[name] = now
            self._used.move_to_end(name)

    def expire(self, now: float) -> list[bytes]:
        """Removes and returns what was last used more than ttl_s before `now` (seconds, never going back)."""
        gone = []
        while self._used:
            name, used = next(iter(self._used.items()))
            if now - used <= self.ttl_s:
                break
            del self._used[name]
            gone.append(name)
        return gone
