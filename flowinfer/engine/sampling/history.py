"""What one sequence has said so far, for its penalties. Slots without penalties have none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids, Sampling


class History:
    """Token counts of one sequence. Repetition looks at prompt and output, presence and frequency at output alone.

    counts int32 [vocab]: of the output.  seen: the distinct tokens that a penalty may touch, in order of appearance.
    """

    def __init__(self, sampling: Sampling, tokens: Ids, num_prompt: int, vocab: int) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self.repetition = sampling.repetition_penalty
        self.counts = np.zeros(vocab, np.int32)
        self._known = np.zeros(vocab, np.bool_)
        self._seen = np.empty(256, np.int64)
        self._num_seen = 0
        if self.repetition != 1:
            prompt = tokens[:num_prompt]
            self._learn(np.unique(prompt[(prompt >= 0) & (prompt < vocab)]))
        self.extend(tokens[num_prompt:])

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        """Whether these settings hold a penalty."""
        return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0

    def extend(self, output: Ids) -> None:
        """Counts further tokens of the output."""
        for token in output.tolist():  # a handful; only a sequence that comes back brings more
            self._count(token)

    def with_drafts(self, drafts: Ids) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """(seen, subtract) for the row of the last token and of each draft, as if the drafts before it were taken.

        The history itself stays as it was. The arrays hold until the next `extend`.
        """
        known, counted, rows = self._num_seen, [], [self._row()]
        for draft in drafts.tolist():
            self._count(draft)
            counted.append(draft)
            rows.append(self._row())
        for draft in counted:
            self.counts[draft] -= 1
        self._known[self._seen[known : self._num_seen]] = False
        self._num_seen = known
        return rows

    def _count(self, token: int) -> None:
        self.counts[token] += 1
        if not self._known[token]:
            self._learn(np.array([token]))

    def _row(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        seen = self._seen[: self._num_seen]
        if not self._presence and not self._frequency:
            return seen, np.empty(0, np.float32)
        counts = self.counts[seen]
        return seen, (self._frequency * counts + self._presence * (counts > 0)).astype(np.float32)

    def _learn(self, tokens: NDArray[np.integer]) -> None:
        end = self._num_seen + tokens.size
        if end > self._seen.size:
            grown = np.empty(max(end, 2 * self._seen.size), np.int64)
            grown[: self._num_seen] = self._seen[: self._num_seen]
            self._seen = grown
        self._seen[self._num_seen : end] = tokens
        self._known[tokens] = True
        self._num_seen = end
