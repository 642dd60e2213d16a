"""Turns the logits of a decode step into accepted tokens, finished sequences and the next proposal.

Owns the output history of the batch (tokens, num_tokens); slots and KV are moe-decode's, stop strings detokenize's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from flowinfer.errors import RequestError, StageError
from flowinfer.message import (
    Ended,
    Event,
    FinishReason,
    Ids,
    Logits,
    Progress,
    Proposal,
    Sequence,
    TokenLogprob,
    Tokens,
)
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.spec_verify.drafting import Drafting
from flowinfer.stages.spec_verify.drafts import Drafter, NgramDraft
from flowinfer.stages.spec_verify.policy import LENGTH, RUNS, STOP, StopRules, count_matches, pad_rows
from flowinfer.stages.spec_verify.sources import ON_GPU, fits, is_quick, make_acceptances, make_drafter, make_schedule
from flowinfer.stages.spec_verify.tenants import Tenants
from flowinfer.units import ByteSize

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch

log = logging.getLogger(__name__)
_REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length"}
_NONE: Ids = np.empty(0, np.int32)


class Verdict(NamedTuple):
    """What one step gave: slots[i] got the first counts[i] of tokens[i], accepted[i] of them drafts."""

    slots: Ids
    first_rows: Ids
    tokens: Ids  # [n, W]
    counts: Ids
    accepted: Ids
    reasons: Ids  # RUNS, STOP or LENGTH


class SpecVerify(Stage):
    """Accepts drafts, samples, ends sequences and drafts their next tokens, for the whole batch at once."""

    listens = (Ended,)

    class Config(StageConfig):
        """draft: where drafts come from; none samples one token a step.  tokens: drafts verified per step at most.

        schedule: fixed verifies all drafts, learned those that pay by row_cost, confidence those that give most tokens
        a second by measured step times.  head: file of the draft head; default, the one that comes with the model.
        draft_model, draft_memory: what draft: model runs, and the memory for its keys and values at most.
        ngram_min, ngram_max: lengths of the n-grams that ngram looks up.
        row_cost: time of one more row in a decode step as a share of the step's fixed time; the dearer a row, the surer
        a draft must be (0: always draft all).
        """

        draft: Literal["none", "ngram", "suffix", "head", "model"] = setting("ngram", change="live")
        tokens: int = setting(4, change="live", ge=1, le=8)
        schedule: Literal["fixed", "learned", "confidence"] = setting("learned", change="live")
        head: str = setting("", change="live")
        draft_model: str = setting("", change="live")
        draft_memory: ByteSize = setting(256 * 2**20, change="live")
        ngram_min: int = setting(2, change="live", ge=1, le=16)
        ngram_max: int = setting(4, change="live", ge=1, le=16)
        row_cost: float = setting(0.12, change="live", ge=0)  # SmolLM2 on 2 cores: 0.10 to 0.13 in bfloat16 and float32

        @model_validator(mode="after")
        def _complete(self) -> SpecVerify.Config:
            if self.ngram_min > self.ngram_max:
                raise ValueError(f"ngram_min ({self.ngram_min}) is above ngram_max ({self.ngram_max})")
            if self.draft == "model" and not self.draft_model:
                raise ValueError("draft: model needs draft_model, a smaller model with the same vocabulary")
            return self

        def contract(self) -> Contract:
            """Shares the batch with moe-decode, so both run in one worker; what drafts must suit the model there."""
            return Contract(
                beside=frozenset({"moe-decode"}),
                model=ModelUse(self.draft_model) if self.draft == "model" else None,
                fits=fits(self),
                on_gpu=ON_GPU if self.draft not in ("none", "ngram") else "",
            )

    config: Config
    batch: Batch

    def open(self) -> None:
        """Takes the batch that moe-decode made. Raises StageError where there is none."""
        from flowinfer.engine.sampling import Sampler

        batch = self.batch = self.ctx.shared("decode-batch", self._no_batch)
        slots = batch.max_slots
        self.sampler = Sampler(
            max_slots=slots,
            vocab_size=batch.vocab_size,
            eos_token_ids=batch.eos_token_ids,
            grammars=batch.grammars,
        )
        self.stops = StopRules(slots, batch.max_tokens, batch.eos_token_ids)
        self.tenants = Tenants(batch, on_leave=self._leave)
        self.num_top: dict[int, int] = {}  # of the slots that asked for logprobs
        self._named: tuple[Ids | None, int, list[str]] = None, -1, []  # slots, the batch's changes, requests
        self._next: Callable[[], None] | None = None
        self._wanted = self.config
        self._draft_by(self.config, make_drafter(self.config, batch))
        batch.progress_of = self._progress

    def reconfigure(self, config: Config) -> None:
        """Drafts by these settings once the drafts that are being verified have been judged.

        What has to be loaded first is loaded in the pool; until then, the old drafter goes on.
        """
        self._wanted = config
        make = partial(make_drafter, config, self.batch)
        if is_quick(config):
            self._next = lambda: self._draft_by(config, make())
        else:
            self.ctx.submit(make, partial(self._loaded, config))

    def _loaded(self, config: Config, drafter: Drafter | BaseException | None) -> None:
        if isinstance(drafter, BaseException):
            log.warning("%s goes on drafting as before: %s", self.ctx.stage, drafter)
        elif config is self._wanted:  # else another change came meanwhile
            self._next = lambda: self._draft_by(config, drafter)

    def _draft_by(self, config: Config, drafter: Drafter | None) -> None:
        """Drafts anew, from the histories that there are. Only while no draft is under way."""
        schedule = make_schedule(config, self.batch, may_measure=not self.tenants.slot_of)
        self.drafting = Drafting(
            self.batch,
            self.sampler,
            self.stops.limit,
            drafter,
            schedule,
            max_drafts=config.tokens,
            acceptances=make_acceptances(config),
            ngram=drafter.ngram if isinstance(drafter, NgramDraft) else None,
        )
        for slot in self.tenants.slot_of.values():
            self.drafting.join(slot)

    def step(self, logits: list[Logits]) -> Iterable[Tokens | Proposal]:
        """Tokens of each step of the batch, and one proposal for what runs next."""
        proposed = []
        for one in logits:
            self._take_joined(one.slots)
            began = time.perf_counter()
            verdict = self._judge(one)
            self.drafting.timed(one, time.perf_counter() - began)
            if verdict.slots.size:
                yield self._tokens(one, verdict)
                proposed.append((one.step, verdict.slots[verdict.reasons == RUNS]))
        if self._next is not None:
            self._next()
            self._next = None
        slots = np.concatenate([slots for _, slots in proposed]) if proposed else _NONE
        if slots.size:
            yield self._propose(proposed[-1][0], slots)

    def cancel(self, requests: Collection[str]) -> None:
        """Forgets these sequences; moe-decode frees their slots."""
        self.tenants.forget(requests)

    def observe(self, event: Event) -> None:
        """Forgets sequences that ended elsewhere, as one that failed while it was preempted."""
        if isinstance(event, Ended):
            self.tenants.forget(event.ids)

    # -------------------------------------------------------------------------------------------- who is in which slot

    def _no_batch(self) -> Batch:
        raise StageError(
            self.ctx.stage, "finds no decode batch in its worker.", help="Place it with a moe-decode stage."
        )

    def _take_joined(self, ran: Ids) -> None:
        """Takes up the sequences that ran for the first time in this step."""
        if self.batch.joined:
            now = set(ran.tolist())
            for slot in [slot for slot in self.batch.joined if slot in now]:
                self.batch.joined.remove(slot)
                self._join(slot)

    def _join(self, slot: int) -> None:
        self.tenants.move_in(slot)
        batch, prompt = self.batch, self.batch.prompts[slot]
        assert prompt is not None, "a slot that joined holds a sequence"
        num_prompt = int(batch.num_prompt[slot])
        self.sampler.join(slot, prompt.sampling, prompt.id, batch.history(slot), num_prompt)
        self.stops.join(slot, prompt.sampling, num_prompt)
        self.drafting.join(slot, prompt.progress)
        if prompt.sampling.logprobs is not None:
            self.num_top[slot] = prompt.sampling.logprobs

    def _progress(self, sequence: Sequence, history: Ids) -> Progress | None:
        """What another worker must know to go on with a sequence; what its tokens imply is rebuilt from them."""
        output = history[len(sequence.tokens) :]
        if not output.size:
            return None
        cached, drafted, accepted = self.tenants.usage_of(sequence)
        slot = self.tenants.slot_of.get(sequence.id)
        hits, trials = (0.0, 0.0) if slot is None else self.drafting.record(slot)
        return Progress(
            output=output,
            cached_tokens=cached,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            hits=hits,
            trials=trials,
        )

    def _leave(self, slot: int) -> None:
        self.sampler.leave(slot)
        self.num_top.pop(slot, None)
        self.drafting.leave(slot)

    # ------------------------------------------------------------------------------------------- what the step decided

    def _judge(self, step: Logits) -> Verdict:
        """Samples, accepts, cuts at ends, and writes the history. Rows of sequences that are gone are left out."""
        slots, batch = step.slots, self.batch
        known = self.tenants.known(slots)
        if step.drafts is not None:
            self.drafting.take(slots, step.drafts)
        positions = batch.num_tokens[slots]
        if step.chosen is not None and len(step.chosen) == slots.size:  # most steps on a GPU: the host has least time
            chosen, accepted = step.chosen[:, None], np.zeros(slots.size, np.int32)
            num_drafts = accepted
        else:
            drafts = self.drafting.guesses[slots] if step.drafts is None else step.drafts.tokens
            rows = step.chosen
            if rows is None:
                rows = self.sampler.choose(step.logits, slots, step.starts, positions, drafts).astype(np.int32)
            num_drafts = np.diff(step.starts) - 1
            chosen = pad_rows(rows, step.starts)
            accepted = count_matches(chosen, drafts, num_drafts)
        known = self._finite(slots, chosen, accepted, known)
        firsts = step.starts[:-1]
        if not known.all():
            slots, firsts, chosen, accepted = slots[known], firsts[known], chosen[known], accepted[known]
            positions, num_drafts = positions[known], num_drafts[known]
        counts, reasons = self.stops.cut(slots, chosen, accepted + 1, positions)
        accepted = np.minimum(accepted, counts)
        self._write(slots, chosen, counts, positions)
        if chosen.shape[1] > 1:
            self.tenants.usage[slots, 1] += num_drafts
            self.tenants.usage[slots, 2] += accepted
        if self.drafting.drafter:
            self.drafting.learn(slots, chosen, counts, num_drafts, accepted)
            going = reasons == RUNS
            self.drafting.observe(step, slots[going], firsts[going], counts[going])
        return Verdict(slots, firsts, chosen, counts, accepted, reasons)

    def _finite(self, slots: Ids, chosen: Ids, accepted: Ids, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of the known sequences have logits that can be sampled; the others fail."""
        if chosen.min(initial=0) >= 0:
            return known
        finite = np.logical_not(((chosen < 0) & (np.arange(chosen.shape[1]) <= accepted[:, None])).any(1))
        for slot in slots[known & ~finite].tolist():
            request, error = self.tenants.ids[slot], self.sampler.failure(slot)
            self.tenants.move_out(slot)
            self.batch.finish(slot)
            text = "The model gave logits that aren't finite for this request."
            self.ctx.fail(request, error or RequestError(500, text, code="logits_not_finite"))
        return finite & known

    def _write(self, slots: Ids, chosen: Ids, counts: Ids, positions: Ids) -> None:
        batch = self.batch
        if chosen.shape[1] == 1 and counts.all():
            batch.tokens[slots, positions] = chosen[:, 0]
        else:
            new = np.arange(chosen.shape[1]) < counts[:, None]
            at = positions[:, None] + np.arange(chosen.shape[1])
            batch.tokens[np.repeat(slots, counts), at[new]] = chosen[new]
        batch.num_tokens[slots] = positions + counts
        tracked = self.sampler.tracked
        if tracked:
            for i in [i for i, slot in enumerate(slots.tolist()) if slot in tracked]:
                self.sampler.advance(int(slots[i]), chosen[i, : counts[i]])

    # ---------------------------------------------------------------------------------------------------- what goes out

    def _tokens(self, step: Logits, verdict: Verdict) -> Tokens:
        slots = verdict.slots.tolist()
        if verdict.tokens.shape[1] == 1 and verdict.counts.all():
            tokens = verdict.tokens[:, 0]
        else:
            tokens = verdict.tokens[np.arange(verdict.tokens.shape[1]) < verdict.counts[:, None]]
        message = Tokens(
            step=step.step,
            ids=self._ids_of(verdict.slots, slots),
            counts=verdict.counts,
            tokens=tokens,
            opened=self.tenants.open(slots),
            positions=self.batch.num_tokens[verdict.slots] - verdict.counts - self.batch.num_prompt[verdict.slots],
            logprobs=self._logprobs(step, verdict, slots) if self.num_top else {},
        )
        for i in np.flatnonzero(verdict.reasons).tolist():
            reason = int(verdict.reasons[i])
            stop = int(verdict.tokens[i, verdict.counts[i] - 1]) if reason == STOP else None
            message.finished[i] = self.tenants.finish(slots[i], _REASONS[reason], stop)
        return message

    def _ids_of(self, named: Ids, slots: list[int]) -> list[str]:
        """Requests of these slots. The batch gives the same array as long as the same sequences run."""
        known, changes, ids = self._named
        if known is not named or changes != self.batch.num_changes:
            ids = [self.tenants.ids[slot] for slot in slots]
            self._named = named, self.batch.num_changes, ids
        return ids

    def _logprobs(self, step: Logits, verdict: Verdict, slots: list[int]) -> dict[int, list[TokenLogprob]]:
        from flowinfer.engine.sampling import token_logprob

        found = {}
        for i, slot in enumerate(slots):
            if slot in self.num_top:
                first, tokens = int(verdict.first_rows[i]), verdict.tokens[i, : verdict.counts[i]].tolist()
                rows = step.logits[first : first + len(tokens)]
                found[i] = [token_logprob(*pair, self.num_top[slot]) for pair in zip(rows, tokens, strict=True)]
        return found

    def _propose(self, step: int, slots: Ids) -> Proposal:
        """The last token of each sequence and, where they are worth it, drafts."""
        last = self.batch.tokens[slots, self.batch.num_tokens[slots] - 1]
        counts, drafts = self.drafting.propose(step, slots)
        if not drafts.shape[1]:
            return Proposal(step=step, slots=slots, counts=counts, tokens=last)
        rows = np.concatenate([last[:, None], drafts], axis=1)
        return Proposal(step=step, slots=slots, counts=counts, tokens=rows[np.arange(rows.shape[1]) < counts[:, None]])
