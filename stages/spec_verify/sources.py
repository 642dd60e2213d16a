"""Makes the drafter and the schedule that the settings name, and says what of them suits a model. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flowinfer.stage import Fit
from flowinfer.stages.spec_verify import vocabulary
from flowinfer.stages.spec_verify.costs import StepCosts, StepTable
from flowinfer.stages.spec_verify.drafts import (
    Acceptance,
    Acceptances,
    Drafter,
    DraftSchedule,
    FixedLength,
    LearnedLength,
    NgramDraft,
)
from flowinfer.stages.spec_verify.schedule import ConfidenceLength, PositionAcceptance
from flowinfer.stages.spec_verify.suffix import SuffixDraft

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.engine import Engine
    from flowinfer.stages.spec_verify.stage import SpecVerify

ON_GPU = "its drafts are the host's: steps that verify them don't run ahead of it, as they do with `ngram` or `none`."


def fits(config: SpecVerify.Config) -> tuple[Fit, ...]:
    """What must suit the model that decodes."""
    if config.draft == "model":
        return (Fit("draft_model", "moe-decode", partial(vocabulary.misfit, config.draft_model)),)
    if config.draft != "head":
        return ()

    def suits(model: str) -> tuple[str, str] | None:
        from flowinfer.engine import heads

        problem = None if heads.is_nowhere(model) else heads.misfit(model, config.head)
        return (f"draft: head, but {problem.message}", problem.help) if problem else None

    def drafts(model: str) -> tuple[str, str] | None:
        from flowinfer.engine import heads

        if heads.is_nowhere(model) or heads.misfit(model, config.head):
            return None  # which is said at `draft`
        block = heads.read(heads.find(model, config.head)).block
        if config.tokens <= block:
            return None
        return (
            f"tokens: {config.tokens}, but the draft head's block is {block} tokens.",
            f"Write tokens: {block}, or less.",
        )

    named = Fit("head", "moe-decode", suits) if config.head else Fit("draft", "moe-decode", suits, instead="ngram")
    return named, Fit("tokens", "moe-decode", drafts)


def is_quick(config: SpecVerify.Config) -> bool:
    """Whether its drafter is made at once, with nothing to load."""
    return config.draft not in ("head", "model")


def make_drafter(config: SpecVerify.Config, batch: Batch) -> Drafter | None:
    """The drafter of `draft`; None where nothing is drafted.

    Raises ModelError for a head that isn't there or doesn't suit the model.
    """
    most = min(config.tokens, batch.max_drafts)
    match config.draft:
        case "none":
            return None
        case "head":
            return _head(config, batch)
        case "model":
            return _model(config, batch, most)
        case "suffix":
            return SuffixDraft(batch.tokens, batch.num_prompt, partial(_salt_of, batch), max_drafts=most)
        case "ngram":
            lengths = {"ngram_min": config.ngram_min, "ngram_max": config.ngram_max}
            return NgramDraft(batch.tokens, max_drafts=most, **lengths)


def _salt_of(batch: Batch, slot: int) -> str:
    prompt = batch.prompts[slot]
    return "" if prompt is None else prompt.cache_salt


def _head(config: SpecVerify.Config, batch: Batch) -> Drafter:
    from flowinfer.engine import heads
    from flowinfer.engine.draft import DraftHead
    from flowinfer.stages.spec_verify.head import HeadDraft

    if problem := heads.misfit(batch.model_name, config.head):
        raise problem
    target = _engine(batch).model
    path = heads.find(batch.model_name, config.head)
    head = DraftHead.load(path, target.embedding, target.project, target.device, target.dtype)
    return HeadDraft(head, batch.tokens, target.device)


def _model(config: SpecVerify.Config, batch: Batch, most: int) -> Drafter:
    from flowinfer.engine import hub
    from flowinfer.engine.models import load_model
    from flowinfer.errors import ModelError
    from flowinfer.stages.spec_verify.model_draft import ModelDraft

    if problem := vocabulary.misfit(config.draft_model, batch.model_name):
        raise ModelError(problem[0], help=problem[1])
    folder, target = hub.resolve(config.draft_model), _engine(batch).model
    model = load_model(folder, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
    layout = hub.describe(folder).layout(str(model.dtype).removeprefix("torch."))
    longest = layout.blocks_for(min(batch.max_tokens, model.config.max_positions) + most)
    num_blocks = max(1, min(config.draft_memory // layout.block_bytes, batch.max_slots * longest))
    return ModelDraft(model, layout, batch.tokens, block=most, num_blocks=num_blocks)


def _engine(batch: Batch) -> Engine:
    assert batch.engine is not None, "moe-decode gives the batch its engine"
    return batch.engine


def make_schedule(config: SpecVerify.Config, batch: Batch, *, may_measure: bool) -> DraftSchedule:
    """The schedule of `schedule`. may_measure: nothing runs yet, so that step times can be measured (2 s, once)."""
    if config.draft == "none":
        return FixedLength()  # of nothing
    match config.schedule:
        case "fixed":
            return FixedLength()
        case "learned":
            return LearnedLength(config.row_cost)
        case "confidence":
            return ConfidenceLength(StepCosts(_step_times(config, batch, may_measure=may_measure)))


def _step_times(config: SpecVerify.Config, batch: Batch, *, may_measure: bool) -> StepTable:
    from flowinfer.folders import cache_dir
    from flowinfer.stages.spec_verify import profile

    most = batch.max_slots * (1 + min(config.tokens, batch.max_drafts))
    if may_measure:
        return profile.step_table(_engine(batch), most, cache_dir() / "step_times")
    return profile.guessed_table(_engine(batch), most)


def make_acceptances(config: SpecVerify.Config) -> Callable[[int, int], Acceptances]:
    """What stands for confidences where the drafter has none."""
    return PositionAcceptance if config.schedule == "confidence" else Acceptance
