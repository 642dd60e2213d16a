"""Drafts for the running batch: keeps what was guessed for each sequence, learns from what came, proposes the next.

Where drafts come from and how many are verified is decided by a Drafter and a DraftSchedule (see drafts.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flowinfer.engine.draft_plan import DraftPlan
from flowinfer.message import Drafts, Ids, Logits, Progress
from flowinfer.stages.spec_verify.calibration import Calibration
from flowinfer.stages.spec_verify.count import SpecCounters
from flowinfer.stages.spec_verify.drafts import F32, Acceptance, Acceptances, Choose, Drafter, DraftSchedule, Ran
from flowinfer.stages.spec_verify.policy import F64, count_matches

if TYPE_CHECKING:
    from torch import Tensor

    from flowinfer.engine.batch import Batch
    from flowinfer.engine.sampling import Sampler


class Drafting:
    """One way to draft, for all slots of a batch. Without a drafter it proposes each sequence's last token alone.

    max_drafts: drafts of a sequence that a step verifies at most, D.  limit int32 [max_slots]: length at which each
    sequence ends, read in place.
    """

    def __init__(
        self,
        batch: Batch,
        sampler: Sampler,
        limit: Ids,
        drafter: Drafter | None,
        schedule: DraftSchedule,
        max_drafts: int,
        acceptances: Callable[[int, int], Acceptances] = Acceptance,
        ngram: tuple[int, int] | None = None,
    ) -> None:
        """ngram: lengths of n-grams, least and most, if these are the drafts; a captured step may look them up."""
        self.batch, self.sampler, self.limit = batch, sampler, limit
        self.drafter, self.schedule = drafter, schedule
        self.max_drafts = min(max_drafts, batch.max_drafts, drafter.block) if drafter else 0
        self.counters = SpecCounters(self.max_drafts)
        self.acceptances = acceptances(batch.max_slots, self.max_drafts)
        self.guesses: Ids = np.zeros((batch.max_slots, self.max_drafts), np.int32)
        self.said: F32 = np.zeros((batch.max_slots, self.max_drafts), np.float32)  # confidences, by the drafter
        self.confidences: F32 = self.said.copy()  # and as they are believed
        self.has_guess = np.zeros(batch.max_slots, np.bool_)
        self._no_drafts: Ids = np.zeros((batch.max_slots, 0), np.int32)
        self.knows_confidence = False  # whether the drafter says any
        self.calibration = Calibration()
        self._is_ahead, self._is_due = False, False  # the last step ran ahead of the host; a look waits for that to end
        self._landed_at = 0.0  # when the last step did that ran ahead
        self.looks_up = bool(ngram) and batch.overlaps and self.max_drafts > 0
        layers = drafter.needs_features if drafter else ()
        self.plan = DraftPlan(self.max_drafts, ngram if self.looks_up else None, layers)
        self.lead()

    def lead(self) -> None:
        """The batch is drafted for in this way from now on."""
        self.batch.drafting = self.max_drafts > 0 and not self.looks_up
        self.batch.feature_layers = self.plan.feature_layers
        self.batch.plan = self.plan
        self.batch.most_drafts[:] = 0
        self.batch.replan()

    def join(self, slot: int, progress: Progress | None = None) -> None:
        """Takes up the sequence that now runs in this slot. progress: what another worker learned of it."""
        if self.drafter:
            self.drafter.join(slot)
            self.acceptances.join(slot, *((progress.hits, progress.trials) if progress else ()))

    def leave(self, slot: int) -> None:
        """Its sequence is gone."""
        self.has_guess[slot] = False
        if self.drafter:
            self.drafter.leave(slot)

    def record(self, slot: int) -> tuple[float, float]:
        """How well this slot's guesses did, for who goes on with it."""
        return self.acceptances.record(slot) if self.drafter else (0.0, 0.0)

    # ------------------------------------------------------------------------------------------ what a step has shown

    def timed(self, step: Logits, judged_s: float) -> None:
        """Tells the schedule how long the step took: the model, and the judgement of its rows (judged_s seconds).

        A step that ran ahead of the host took the time since the one before it.
        """
        if not self.drafter:
            return
        context, num_rows = float(self.batch.num_tokens[step.slots].mean()), int(step.starts[-1])
        now, before = time.perf_counter(), self._landed_at
        self._is_ahead = step.chosen is not None and step.seconds == 0
        self._landed_at = now if self._is_ahead else 0.0
        seconds = step.seconds + judged_s if step.seconds > 0 else now - before if self._is_ahead and before else 0.0
        if seconds > 0:
            self.schedule.timed(num_rows, seconds, context, plain=num_rows == step.slots.size)

    def observe(self, step: Logits, slots: Ids, first_rows: Ids, counts: Ids) -> None:
        """slots[i] goes on, with counts[i] new tokens: the first counts[i] of its rows ran what is history now."""
        if not self.drafter or step.drafts is not None:  # which it looks up in the history itself
            return
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = np.repeat(slots, counts)
        positions = np.repeat(self.batch.num_tokens[slots] - 1 - counts, counts) + within
        import torch

        features = None
        if step.features is not None:
            rows = torch.from_numpy(np.repeat(first_rows, counts) + within)
            features = step.features[rows.to(step.features.device)]
        tokens = self.batch.tokens[owners, positions]
        self.drafter.observe(Ran(owners, positions.astype(np.int32), tokens, features))

    def take(self, slots: Ids, drafts: Drafts) -> None:
        """A step put drafts of its own to the test. Those of settings that are gone say nothing."""
        if self.looks_up and drafts.tokens.shape[1] == self.max_drafts:
            self.has_guess[slots], self.guesses[slots], self.knows_confidence = drafts.found, drafts.tokens, False

    def learn(self, slots: Ids, chosen: Ids, counts: Ids, num_drafts: Ids, accepted: Ids) -> None:
        """Counts what was verified, and learns from what was guessed, verified or not."""
        if num_drafts.any():
            self.counters.count(*(np.minimum(numbers, self.max_drafts) for numbers in (num_drafts, accepted)))
        guessed = self.has_guess[slots] & (counts > 0)
        if not guessed.any():
            return
        slots, chosen, counts = slots[guessed], chosen[guessed], counts[guessed]
        hits = count_matches(chosen, self.guesses[slots], counts)
        trials = np.minimum(np.minimum(hits + 1, counts), self.max_drafts)
        self.acceptances.learn(slots, hits, trials)
        if self.knows_confidence:
            self.counters.calibrate(self.confidences[slots], hits, trials)
            places = np.arange(self.max_drafts)
            said = self.said[slots]
            tested, held = (places < trials[:, None]) & (said > 0), places < hits[:, None]
            self.calibration.learn(said[tested], held[tested])

    # ------------------------------------------------------------------------------------------------- what runs next

    def propose(self, step: int, slots: Ids) -> tuple[Ids, Ids]:
        """Rows of each sequence in the next step, int32 [n], and its drafts, int32 [n, D], counts[i] - 1 of them meant.

        Never more than its end leaves room for, and none that its grammar refuses.
        """
        ones: Ids = np.ones(slots.size, np.int32)
        if not self.drafter:
            return ones, self._no_drafts[: slots.size]
        confidences = self.acceptances.of(slots)
        if self.looks_up and self.batch.on_device[slots].all():
            self._allow(slots, confidences)
            return ones, self._no_drafts[: slots.size]
        if not self._may_guess(confidences, step):
            self.has_guess[slots] = False
            return ones, self._no_drafts[: slots.size]
        num_tokens = self.batch.num_tokens[slots]
        began = time.perf_counter()
        found, tokens, own = self.drafter.guess(slots, num_tokens, self._chooser(slots, num_tokens))
        self.schedule.drafted(slots.size, time.perf_counter() - began)
        drafts = tokens[:, : self.max_drafts]
        self.has_guess[slots], self.guesses[slots] = found, drafts
        self.knows_confidence = own is not None
        if own is not None:
            said = own[:, : self.max_drafts]
            self.said[slots] = said
            believed = said if self.drafter.calibrated else self.calibration.apply(said)
            self.confidences[slots] = believed * (said > 0)
            confidences = self.confidences[slots].astype(np.float64)
        room = self.limit[slots] - num_tokens - 1  # verifying k drafts may give k + 1 tokens
        limits = np.where(found, np.minimum(room, self.max_drafts), 0)
        if own is not None:  # no drafter means a draft that it gives no chance at all
            limits = np.minimum(limits, np.logical_and.accumulate(said > 0, axis=1).sum(1))
        counts = ones + self.schedule.choose(confidences, limits.astype(np.int64)).astype(np.int32)
        constrained = self.sampler.constrained
        if constrained:  # a draft that the grammar refuses would only cost a row
            for i in [i for i, slot in enumerate(slots.tolist()) if slot in constrained and counts[i] > 1]:
                counts[i] = 1 + self.sampler.fitting(int(slots[i]), drafts[i, : counts[i] - 1])
        return counts, drafts

    def _allow(self, slots: Ids, confidences: F64) -> None:
        """Steps look up drafts by themselves, ahead of the host, which says how many they may verify of each."""
        limits = np.full(slots.size, self.max_drafts, np.int64)
        self.batch.most_drafts[slots] = self.schedule.choose(confidences, limits)
        self.batch.drafting = False
        self.has_guess[slots] = False  # until a step says what it found

    def _may_guess(self, confidences: F64, step: int) -> bool:
        """Whether drafts are wanted now; while they aren't, steps may run ahead of the host, and must land first.

        The last step must have given the features of its tokens, too.
        """
        assert self.drafter is not None, "somebody drafts"
        wanted, has_features = self.drafter.needs_features, self.batch.feature_layers == self.drafter.needs_features
        self._is_due = self._is_due or self.schedule.looks(confidences[:, 0], step)
        if self.batch.overlaps:
            self.batch.drafting = self._is_due
            self.batch.feature_layers = wanted if self._is_due else ()
        may_guess = self._is_due and not self._is_ahead and has_features
        self._is_due = self._is_due and not may_guess
        return may_guess

    def _chooser(self, slots: Ids, num_tokens: Ids) -> Choose:
        """Chooses draft after draft as the target will, with its settings and its noise."""
        import torch

        chosen: Ids = np.zeros((slots.size, 0), np.int32)

        def choose(place: int, logits: Tensor) -> Tensor:
            nonlocal chosen
            tokens = self.sampler.draft(logits, slots, num_tokens + place, chosen[:, :place])
            chosen = np.concatenate([chosen[:, :place], tokens[:, None].astype(np.int32)], axis=1)
            return torch.from_numpy(tokens).to(logits.device)

        return choose
