"""Keeps a step running on the device while the host looks at the one before. Only for sequences that need no host.

A step is started over everyone whose sequence is known to go on: those of the step before it, less those that reach
their last token there, plus those that joined. A stop token is seen one step late, and that row is thrown away. Steps
that draft for themselves, by look-up, give a sequence one token or more: the least is what its going on hangs on, the
most is what its blocks are for.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from flowinfer.message import Drafts, Ids, Logits

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.decode_graphs import DecodeGraphs, Flight, Judged


class Overlap:
    """The steps in flight, oldest first."""

    def __init__(self, graphs: DecodeGraphs, batch: Batch) -> None:
        self.graphs, self.batch = graphs, batch
        self.flights: deque[Flight] = deque()
        self.plan = graphs.plan  # of batch, as it was followed
        self.waited_s = 0.0  # for the device, in all
        self.started_s = 0.0  # spent on starting steps, in all

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self.flights)

    def follow(self) -> None:
        """Captures steps with drafts as the batch's plan has them, once nothing is in flight."""
        if self.flights or self.plan == self.batch.plan:
            return
        self.plan = self.batch.plan
        self.graphs.follow(self.plan)

    def fits(self, slots: Ids) -> bool:
        """Whether these sequences can run without the host: nothing to edit or to report, no drafts of the host's."""
        followed = self.plan == self.batch.plan
        return followed and not self.batch.drafting and bool(self.batch.on_device[slots].all())

    def pending(self, slots: Ids, *, most: bool = False) -> Ids:
        """Tokens that each slot will get from steps in flight, int32 [n]: at least, or at most."""
        if all(flight.slots is slots and flight.num_changes == self.batch.num_changes for flight in self.flights):
            gives = [flight.most if most and flight.most is not None else 1 for flight in self.flights]
            return np.zeros(len(slots), np.int32) + sum(gives)
        total = np.zeros(self.batch.max_slots, np.int32)
        for flight in self.flights:
            alive = self.batch.live(flight.slots, flight.versions)
            total[flight.slots[alive]] += flight.most[alive] if most and flight.most is not None else 1
        pending: Ids = total[slots]
        return pending

    def continuing(self) -> Ids:
        """Slots of the newest step whose sequence goes on behind it, as far as is known now."""
        newest = self.flights[-1]
        slots = newest.slots
        if newest.num_changes != self.batch.num_changes:
            slots = slots[self.batch.live(slots, newest.versions)]
        going = self.batch.num_tokens[slots] + self.pending(slots) < self.batch.limit[slots]
        return slots if going.all() else slots[going]  # the same array as long as it can be: less is looked at then

    def counts(self, slots: Ids) -> Ids:
        """Rows of each sequence in the next step over these that runs ahead, at most."""
        verifying, ones = self.graphs.verifying, np.ones(len(slots), np.int32)
        if not self.plan.ngram or verifying is None or verifying.rows_for(slots) == 1:
            return ones
        counts: Ids = ones + np.minimum(self.batch.most_drafts[slots], self.plan.num_drafts)
        return counts

    def launch(self, slots: Ids) -> None:
        """Starts a step over these slots."""
        began = time.perf_counter()
        ahead = self.graphs.verifying if self.plan.ngram else None
        self.flights.append((ahead or self.graphs).launch(slots))
        self.started_s += time.perf_counter() - began

    def land(self, step: int) -> Logits | None:
        """The tokens of the oldest step, of those sequences that are still there; None where all are gone."""
        flight = self.flights.popleft()
        began = time.perf_counter()
        tokens = flight.tokens()
        self.waited_s += time.perf_counter() - began
        slots = flight.slots
        if flight.num_changes != self.batch.num_changes:
            alive = self.batch.live(slots, flight.versions)
            slots, tokens = (slots, tokens) if alive.all() else (slots[alive], tokens[alive])
            if not slots.size:
                return None
        if not flight.rows:
            starts = np.arange(len(slots) + 1, dtype=np.int32)
            return Logits(step=step, slots=slots, starts=starts, logits=None, chosen=tokens)
        counts, rows = tokens[:, 0], flight.rows
        if not counts.all():  # a sequence that an earlier step ended, and nobody has looked at that yet
            slots, tokens, counts = slots[counts > 0], tokens[counts > 0], counts[counts > 0]
            if not slots.size:
                return None
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        chosen = tokens[:, 1 : 1 + rows][np.arange(rows) < counts[:, None]]
        drafts = Drafts(tokens=tokens[:, 2 + rows :], found=tokens[:, 1 + rows] > 0)
        return Logits(step=step, slots=slots, starts=starts, logits=None, chosen=chosen, drafts=drafts)

    def judge(self, slots: Ids, counts: Ids, tokens: Ids) -> Judged | None:
        """A captured step over these rows that is waited for; None where none fits. Nothing is in flight."""
        graphs, verifying = self.graphs, self.graphs.verifying
        on_device = bool(self.batch.on_device[slots].all())
        if len(tokens) > len(slots) or self.batch.feature_layers:
            if verifying is None or self.plan != self.batch.plan or not verifying.fits(counts):
                return None
            return verifying.judge(slots, counts, tokens, on_device=on_device)
        return graphs.judge(slots, on_device=on_device)
