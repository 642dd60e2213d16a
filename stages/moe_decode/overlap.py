"""Keeps a step running on the device while the host looks at the one before. Only for sequences that need no host.

A step is started over everyone whose sequence is known to go on: those of the step before it, less those that reach
their last token there, plus those that joined. A stop token is seen one step late, and that row is thrown away.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from flowinfer.message import Ids, Logits

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.decode_graphs import DecodeGraphs, Flight


class Overlap:
    """The steps in flight, oldest first."""

    def __init__(self, graphs: DecodeGraphs, batch: Batch) -> None:
        self.graphs, self.batch = graphs, batch
        self.flights: deque[Flight] = deque()
        self.waited_s = 0.0  # for the device, in all
        self.started_s = 0.0  # spent on starting steps, in all

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self.flights)

    def fits(self, slots: Ids) -> bool:
        """Whether these sequences can run without the host: nothing to edit or to report, no drafts."""
        return not self.batch.drafting and bool(self.batch.on_device[slots].all())

    def pending(self, slots: Ids) -> Ids:
        """Tokens that each slot will get from steps in flight, int32 [n]."""
        total = np.zeros(self.batch.max_slots, np.int32)
        for flight in self.flights:
            alive = self.batch.live(flight.slots, flight.versions)
            total[flight.slots[alive]] += 1
        pending: Ids = total[slots]
        return pending

    def continuing(self) -> Ids:
        """Slots of the newest step whose sequence goes on behind it, as far as is known now."""
        newest = self.flights[-1]
        slots = newest.slots[self.batch.live(newest.slots, newest.versions)]
        going: Ids = slots[self.batch.num_tokens[slots] + self.pending(slots) < self.batch.limit[slots]]
        return going

    def launch(self, slots: Ids) -> None:
        """Starts a step over these slots."""
        began = time.perf_counter()
        self.flights.append(self.graphs.launch(slots))
        self.started_s += time.perf_counter() - began

    def land(self, step: int) -> Logits | None:
        """The tokens of the oldest step, of those sequences that are still there; None where all are gone."""
        flight = self.flights.popleft()
        began = time.perf_counter()
        tokens = flight.tokens()
        self.waited_s += time.perf_counter() - began
        alive = self.batch.live(flight.slots, flight.versions)
        slots, tokens = (flight.slots, tokens) if alive.all() else (flight.slots[alive], tokens[alive])
        if not slots.size:
            return None
        starts = np.arange(len(slots) + 1, dtype=np.int32)
        return Logits(step=step, slots=slots, starts=starts, logits=None, chosen=tokens)
