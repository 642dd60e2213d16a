"""What captured decode steps do about drafts. Imports nothing, so that a stage may name it before torch is there."""

from __future__ import annotations

from typing import NamedTuple


class DraftPlan(NamedTuple):
    """num_drafts: of a sequence that a step verifies at most, 0 where none are made.

    ngram: lengths of n-grams, least and most, that steps look up themselves for the next one; None: the host drafts.
    feature_layers: whose output the host's drafter wants.
    """

    num_drafts: int = 0
    ngram: tuple[int, int] | None = None
    feature_layers: tuple[int, ...] = ()
