"""Where a prompt begins behind a cached prefix, where attention has windows. Pure: numbers of blocks in and out.

Of most blocks the lower tiers keep only what every later token may read (compressed entries). What follows a block also
needs the window keys before it and the rows of open groups: its state. A block that lacks it is *partial*. Behind whole
blocks a prompt begins at once. Else the end of the hit is replayed: run again, for its state alone, while the cached
entries stay as they are and no window key before the replay's first token is read. Layer by layer one window more of
that is exact; so after layers x window tokens all of it is (exact), and after one window it is near (bounded, as
DeepSeek-V4.1 does: arXiv 2609.19969, section 3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["exact", "bounded", "off"]
DEFAULT: Mode = "exact"  # what comes out never depends on what was cached


@dataclass(frozen=True)
class Beginning:
    """blocks: leading blocks of the hit that are used; the last `replayed` of them are run again for their state."""

    blocks: int
    replayed: int = 0

    @property
    def first(self) -> int:
        """The first block that is run."""
        return self.blocks - self.replayed


@dataclass(frozen=True)
class ReplayRule:
    """state_blocks: whole blocks that a prompt can begin behind; 0 without windows, where no block is ever partial.

    blocks: how many a replay runs again; None: none is wanted.  inexact: of those, the leading ones whose state is only
    near afterwards.
    """

    state_blocks: int = 0
    blocks: int | None = 0
    inexact: int = 0

    def whole_end(self, num: int, partial: Collection[int]) -> int:
        """The most of num leading blocks that a prompt can begin behind at once."""
        for end in range(num, 0, -1):
            if not any(i in partial for i in range(max(0, end - self.state_blocks), end)):
                return end
        return 0

    def begin(self, num: int, partial: Collection[int]) -> Beginning:
        """Of a hit of num blocks: a replay, where that runs fewer tokens than going on behind whole blocks."""
        whole = self.whole_end(num, partial)
        if self.blocks is None or num - whole <= self.blocks:
            return Beginning(whole)
        return Beginning(num, self.blocks)

    def untouched(self, num: int, partial: Collection[int]) -> int:
        """Leading blocks that are written by no beginning of this hit, however much longer it may become."""
        whole = self.whole_end(num, partial)
        if whole == num or self.blocks is None:
            return whole
        return max(whole, num - self.blocks - self.state_blocks)

    def goal(self, at: int, reach: int, partial: Collection[int], stored: Collection[int]) -> tuple[int, list[int]]:
        """What to read of the blocks [at, reach) whose entries are in the lower tiers: (end of it, whose state too).

        stored: blocks whose state is there.
        """
        lacking = (set(partial) | set(range(at, reach))) - set(stored)
        best, whole = self.whole_end(reach, lacking), self.whole_end(at, partial)
        if self.blocks is not None and reach - best > self.blocks:
            return reach, []
        if best <= whole:
            return at, []
        return best, [i for i in range(max(0, best - self.state_blocks), best) if i >= at or i in partial]


def replay_rule(mode: Mode, *, layers: int, window: int, block_tokens: int) -> ReplayRule:
    """The rule for a model; window 0: dense.

    Layer l's keys are exact from l * (window - 1) tokens behind the replay's first token on.
    """
    if not window:
        return ReplayRule()
    state = max(1, _blocks(window - 1, block_tokens))
    if mode == "off":
        return ReplayRule(state, None)
    if mode == "bounded":
        blocks = max(state, _blocks(window, block_tokens))
        return ReplayRule(state, blocks, blocks)
    inexact = _blocks((layers - 1) * (window - 1), block_tokens)
    return ReplayRule(state, inexact + state, inexact)


def leading(there: Sequence[bool]) -> int:
    """How many leading ones are there."""
    return next((i for i, one in enumerate(there) if not one), len(there))


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
