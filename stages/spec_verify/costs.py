"""How long a decode step takes by its rows: measured at start, corrected by the steps that run. Pure: times come in.

Legend: B rows of a step, one a sequence and one a draft that is verified.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

WINDOW = 32  # residuals of a size that count: about a second of steps
ENOUGH, NEWS = 5, 4  # of them before they say anything, and new ones before they say it again
DRAFTS_KEPT, DRAFTS_ENOUGH = 9, 3  # the last draft times of a batch size whose median counts, and from when on
MOST_LOG2 = 13  # of rows of a step whose time is learned apart


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a decode step as they were profiled. rows rise; seconds[i] is of a step over rows[i] rows.

    pair_s: seconds of each query-key pair more, attention's share.  staircase: a step runs padded to the next of
    `rows`, as captured graphs do; else times between two sizes lie on a line.  key: what was measured, a digest.
    """

    key: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    pair_s: float = 0.0
    staircase: bool = False

    @property
    def usable(self) -> bool:
        """Whether the figures can be times of steps."""
        sane = all(0 < seconds < 1e3 for seconds in self.seconds) and 0 <= self.pair_s < 1
        rising = all(a < b for a, b in zip((0, *self.rows), self.rows, strict=False))
        return sane and rising and len(self.rows) == len(self.seconds) > 0


def linear_table(fixed_s: float, row_s: float, most: int = 64) -> StepTable:
    """Of a step that takes fixed_s + row_s a row."""
    rows = tuple(sorted({1, 2, most}))
    return StepTable(key="linear", rows=rows, seconds=tuple(fixed_s + row_s * count for count in rows))


class StepCosts:
    """Seconds of a step over B rows: the table's, times the median of what the last steps took against it.

    A residual is kept as a ratio, since a busy machine slows all of a step, and by size (those of the table, and finer
    ones beside them), since a table is never wrong by the same at all of them. Sizes without ENOUGH of their own lie
    between those beside them that have; while none has, they take the median over all. Beyond the largest that was
    seen, the more hopeful of the table and of a line through what was seen counts: what is too cheap there is soon
    seen, what is too dear would never be tried. Times never fall with B: noise must not make a larger step look
    cheaper.

    Plain steps, without drafts, are learned apart: on a GPU they run in another way, as captured graphs.
    """

    def __init__(self, table: StepTable) -> None:
        self._table = table
        self._rows, self._base = _finer(table)
        self._ratios: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._all: deque[float] = deque(maxlen=WINDOW)
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._newest: deque[float] = deque(maxlen=WINDOW)  # of all plain steps
        self._drafts: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=DRAFTS_KEPT))
        self._times = self._base
        self._num_new = 0  # steps since the times were last made of them

    def seconds(self, rows: I64, context: float = 0.0) -> F64:
        """Of steps over so many rows, each of `context` tokens, float64 like rows; rising with them."""
        base = self._at(rows, self._current())
        times: F64 = base + self._table.pair_s * context * rows
        return times

    def plain_seconds(self, num_sequences: int, context: float = 0.0) -> float:
        """Of a step without drafts; of sizes at which none was seen by the others, and before any was, as of all."""
        own = self._plain[self._bucket(num_sequences)]
        seen = own if len(own) >= ENOUGH else self._newest
        if len(seen) < ENOUGH:
            return float(self.seconds(np.array([num_sequences]), context)[0])
        return median(seen) * self._measured(num_sequences, context)

    @property
    def knows_plain(self) -> bool:
        """Whether steps without drafts were seen."""
        return len(self._newest) >= ENOUGH

    def knows(self, rows: int) -> bool:
        """Whether steps over so many rows, or more, were seen."""
        size = self._bucket(rows)
        return any(known >= size and len(seen) >= ENOUGH for known, seen in self._ratios.items())

    def observe(self, rows: int, seconds: float, context: float = 0.0, *, plain: bool = False) -> None:
        """A step over so many rows took so long. What can't be a time says nothing."""
        if rows <= 0 or not 0 < seconds < 1e3:
            return
        kept, every = (self._plain, self._newest) if plain else (self._ratios, self._all)
        ratio = seconds / self._measured(rows, context)
        kept[self._bucket(rows)].append(ratio)
        every.append(ratio)
        self._num_new += 1

    def _measured(self, rows: int, context: float) -> float:
        """By the table alone."""
        return float(self._at(np.array([rows]), self._base)[0]) + self._table.pair_s * context * rows

    def draft_seconds(self, num_sequences: int) -> float:
        """Of drafting for so many sequences: the median at the nearest size seen, for a larger one by its share."""
        known = [exponent for exponent, seen in self._drafts.items() if len(seen) >= DRAFTS_ENOUGH]
        if not known:
            return 0.0  # the first drafts read whole prompts, and are no measure
        exponent = num_sequences.bit_length()
        nearest = min(known, key=lambda seen: abs(seen - exponent))
        return median(self._drafts[nearest]) * max(1.0, 2.0 ** (exponent - nearest))

    def observe_draft(self, num_sequences: int, seconds: float) -> None:
        """Drafting for so many sequences took so long."""
        if num_sequences > 0 and 0 <= seconds < 1e3:
            self._drafts[num_sequences.bit_length()].append(seconds)

    def _bucket(self, rows: int) -> int:
        """The nearest size; of stairs, the one that the step was padded to."""
        above = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        if self._table.staircase or above == 0:
            return above
        return above if self._rows[above] - rows <= rows - self._rows[above - 1] else above - 1

    def _current(self) -> F64:
        if self._num_new >= NEWS or (self._num_new and len(self._all) < WINDOW):
            own = {size: median(seen) for size, seen in sorted(self._ratios.items()) if len(seen) >= ENOUGH}
            seen_by_all = self._all if len(self._all) >= ENOUGH else self._newest
            common = median(seen_by_all) if len(seen_by_all) >= ENOUGH else 1.0
            known = own or {0: common}
            times = self._base * np.interp(np.arange(len(self._rows)), list(known), list(known.values()))
            if own:  # no size without steps of its own looks dearer than a larger one that has some
                least = np.full(len(times), np.inf)
                least[list(own)] = times[list(own)]
                times = np.minimum(times, np.minimum.accumulate(least[::-1])[::-1])
            if own and not self._table.staircase:
                times = self._hopeful(times, max(own))
            self._times = np.maximum.accumulate(times)
            self._num_new = 0
        return self._times

    def _hopeful(self, times: F64, largest: int) -> F64:
        """Beyond the largest size that was seen, no dearer than the flattest line from a smaller one through it."""
        plain = {size: self._base[size] * median(seen) for size, seen in self._plain.items() if len(seen) >= ENOUGH}
        seen = plain | {size: times[size] for size, seen in self._ratios.items() if len(seen) >= ENOUGH}
        smaller = [size for size in seen if size < largest]
        if not smaller:
            return times
        slopes = [(times[largest] - seen[i]) / (self._rows[largest] - self._rows[i]) for i in smaller]
        line = times[largest] + max(0.0, min(slopes)) * (self._rows - self._rows[largest])
        hopeful: F64 = np.where(np.arange(len(times)) > largest, np.minimum(times, line), times)
        return hopeful

    def _at(self, rows: I64, times: F64) -> F64:
        return _read(self._rows, times, rows, staircase=self._table.staircase)


def _finer(table: StepTable) -> tuple[I64, F64]:
    """Sizes and times of the table; between them (but for stairs) and above also two sizes for each doubling."""
    known, times = np.array(table.rows, np.int64), np.maximum.accumulate(np.array(table.seconds, np.float64))
    least = known[-1] if table.staircase else known[0]
    others = np.unique(np.round(2.0 ** (np.arange(2 * MOST_LOG2 + 1) / 2)).astype(np.int64))
    rows = np.union1d(known, others[others > least])
    return rows, _read(known, times, rows, staircase=table.staircase)


def _read(sizes: I64, times: F64, rows: I64, *, staircase: bool) -> F64:
    """Times of steps over `rows` rows; above the largest size, on the line of the last two."""
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(times) > 1 else times[-1] / sizes[-1]
    if staircase:
        within = times[np.minimum(np.searchsorted(sizes, rows), len(times) - 1)]
    else:
        within = np.interp(rows, sizes, times)
    read: F64 = within + np.maximum(rows - sizes[-1], 0) * slope
    return read
