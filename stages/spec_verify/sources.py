"""Makes the drafter and the schedule that the settings name. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowinfer.stages.spec_verify.drafts import Drafter, DraftSchedule, FixedLength, LearnedLength, NgramDraft

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.stages.spec_verify.stage import SpecVerify


def make_drafter(config: SpecVerify.Config, batch: Batch) -> Drafter | None:
    """The drafter of `draft`; None where nothing is drafted."""
    if config.draft == "none":
        return None
    return NgramDraft(
        batch.tokens,
        ngram_min=config.ngram_min,
        ngram_max=config.ngram_max,
        max_drafts=min(config.tokens, batch.max_drafts),
    )


def make_schedule(config: SpecVerify.Config) -> DraftSchedule:
    """The schedule of `schedule`."""
    return FixedLength() if config.schedule == "fixed" else LearnedLength(config.row_cost)
