"""Runs the model over the last token and the drafts of every running sequence, one step for the whole batch.

Dense models are one expert. Sampling, stops and drafts are spec-verify's; this stage owns slots and KV blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from flowinfer.engine.formats import KVDtype, Weights
from flowinfer.engine.held import KV_EVENTS, Run, grow_all
from flowinfer.engine.step import Features
from flowinfer.errors import RequestError
from flowinfer.message import Event, HandOffRefused, Ids, KVRecall, Leave, Logits, Message, Proposal, Sequence
from flowinfer.observe import metrics
from flowinfer.stage import Contract, Fit, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.moe_decode.experts import ExpertPlanner, Experts, misfit
from flowinfer.stages.moe_decode.policy import blocks_short, youngest
from flowinfer.units import Duration, TokenCount

if TYPE_CHECKING:
    from torch import Tensor

    from flowinfer.engine.batch import Batch
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.grammar import GrammarEngine
    from flowinfer.engine.lower_tiers import LowerTiers
    from flowinfer.stages.moe_decode.overlap import Overlap

MAX_DRAFTS = 8
AHEAD = 2  # steps started and not yet looked at, right after a start
_RETRY_S = 0.005


class MoeDecode(Stage):
    """Decodes all running sequences together; when KV blocks run out, the youngest waits and is computed again."""

    listens = (*KV_EVENTS, Leave, HandOffRefused, KVRecall)

    class Config(StageConfig):
        """model: name, folder, GGUF or hub id.  dtype: of weights and KV.  max_batch: sequences decoded together.

        weights, kv_dtype: as in prefill.
        max_tokens: longest sequence (prompt and output); default, the model's context.
        resume_budget: time a step may spend on computing preempted sequences again.
        experts: where copies of hot experts would lie, among several workers. Planned and measured, not carried out.
        """

        model: str = setting("", change="cold")
        dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", change="cold")
        weights: Weights = setting("checkpoint", change="cold")
        kv_dtype: KVDtype = setting("auto", change="cold")
        max_batch: int = 64
        max_tokens: TokenCount | None = None
        resume_budget: Duration = setting(0.05, change="live")
        experts: Experts = setting(Experts(), change="live")

        def contract(self) -> Contract:
            """Needs kv; shares its batch with spec-verify, so both run in one worker."""
            return Contract(
                needs={"sequences": frozenset({"kv"})},
                drops=frozenset({"kv", "prefix", "bucket"}),
                model=ModelUse(self.model, weights=True, dtype=self.dtype, packed=self.weights, kv=self.kv_dtype),
                beside=frozenset({"spec-verify"}),
                reads=frozenset({"cache-lookup"}),
                fits=(Fit("experts", "moe-decode", misfit),) if self.experts.rebalance else (),
            )

    config: Config
    engine: Engine
    batch: Batch
    lower: LowerTiers | None

    def open(self) -> None:
        """Loads the model and makes the batch that spec-verify shares."""
        from flowinfer.engine.batch import Batch
        from flowinfer.engine.engine import Engine, query_starts
        from flowinfer.engine.grammar import Grammars
        from flowinfer.engine.lower_tiers import LowerTiers
        from flowinfer.transfer.departures import Departures

        self.query_starts = query_starts
        own = self.config
        self.engine = Engine.of(self.ctx, own.model, own.dtype, own.weights, own.kv_dtype)
        self.lower = LowerTiers.of(self.ctx, self.engine)
        model = self.engine.model.config
        self.batch = self.ctx.shared(
            "decode-batch",
            lambda: Batch(
                max_slots=self.config.max_batch,
                max_tokens=min(self.config.max_tokens or model.max_positions, model.max_positions),
                max_drafts=MAX_DRAFTS,
                block_tokens=self.engine.layout.block_tokens,
                eos_token_ids=tuple(model.eos_token_ids),
                vocab_size=model.vocab_size,
                on_finish=self._free_finished,
                grammars=Grammars(self._grammar_engine),
            ),
        )
        self.batch.engine, self.batch.model_name = self.engine, self.config.model
        self.batch.exact_draws = bool(self.engine.layout.kernels)
        self.overlap: Overlap | None = self._overlap()
        self.batch.overlaps = self.overlap is not None
        self.batch.replan = self.overlap.follow if self.overlap is not None else lambda: None
        load = self.engine.expert_load
        self.planner = ExpertPlanner(self.ctx, load.windows["decode"], self.config.experts) if load else None
        self.departures = Departures(self.ctx, self.engine)
        self.engine.on_lessee_lost.append(self._take_back)
        self.waiting: deque[Sequence] = deque()
        self.compiling: set[str] = set()  # their grammars are being made ready in the pool
        self.resuming: dict[str, tuple[Sequence, Ids]] = {}  # preempted, oldest first, with their tokens so far
        self.admitted = np.zeros(self.config.max_batch, np.int64)
        self.num_admitted = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.stalled = False
        metrics.gauge("batch_sequences").labels(stage=self.ctx.stage).set_function(lambda: len(self.batch))
        self.ran = np.zeros(self.config.max_batch, np.int64)  # version of each slot when it last ran

    def reconfigure(self, config: Config) -> None:
        """The budget is read at each step."""
        if self.planner is not None:
            self.planner.reconfigure(config.experts)

    def close(self) -> None:
        """Lets the lower tiers write what they have."""
        if self.lower is not None:
            self.lower.close()

    @property
    def busy(self) -> bool:
        """While sequences wait for a slot or are computed again, or a step is on its way; proposals drive the rest."""
        return bool(self.overlap) or (not self.stalled and bool(self.waiting or self.resuming or self.batch.joined))

    def step(self, sequences: list[Sequence], proposals: list[Proposal]) -> Iterable[Logits]:
        """One decode step over the proposed tokens and over sequences that have just come."""
        for sequence in sequences:
            self._receive(sequence)
        if self.departures.mode:
            self._depart()
        if self.planner is not None:
            self.planner.between_steps()
        slots, counts, tokens = _NOBODY if self.overlap else self._proposed(proposals)
        resumed = self._resume()
        if not resumed:
            self._admit()
        if self.overlap is not None:
            self.overlap.follow()
        if self.overlap is not None and (self.overlap or self._may_overlap(slots)):
            if (landed := self._step_ahead(self.overlap, slots)) is not None:
                yield landed
            return
        slots, counts, tokens = self._with_joined(slots, counts, tokens)
        slots, counts, tokens = self._with_room(slots, counts, tokens)
        if len(slots):
            yield self._run(slots, counts, tokens)
        elif not resumed and (self.waiting or self.resuming) and not self._displace():
            self._stall()

    def observe(self, event: Event) -> Iterable[Message] | None:
        """What others ask of the KV is the engine's; the rest is about sequences that leave."""
        if isinstance(event, Leave):
            self.departures.mode = "" if event.mode == "stay" else event.mode
        elif isinstance(event, HandOffRefused):
            self._take_back(event.id)
        elif isinstance(event, KVRecall):
            for request in event.ids:
                self._take_home(request)
        else:
            self.engine.observe(event, by=self)
        return None

    def cancel(self, requests: Collection[str]) -> None:
        """Takes sequences out of the batch or the queue and frees their blocks; what is complete stays cached."""
        for request in requests:
            slot = self.batch.slot_of.get(request)
            if slot is not None:
                self.batch.finish(slot)
            elif request in self.resuming:
                self.engine.release(request, self.resuming.pop(request)[1])
            else:
                self.waiting = deque(sequence for sequence in self.waiting if sequence.id != request)
                self.compiling.discard(request)
                self.departures.forget(request)
                self.engine.release(request)  # it may also have been on its way to us
        self.engine.starved = bool(self.resuming)

    # ------------------------------------------------------------------------------------------------- who takes part

    def _receive(self, sequence: Sequence) -> None:
        """Queues a sequence, once its grammar is ready."""
        grammar = sequence.sampling.grammar
        if grammar is None:
            self.waiting.append(sequence)
        elif (grammars := self.batch.grammars) is not None:
            self.compiling.add(sequence.id)
            compile = partial(grammars.compile, grammar)
            self.ctx.submit(compile, partial(self._compiled, sequence), request=sequence.id)

    def _compiled(self, sequence: Sequence, result: BaseException | None) -> None:
        if sequence.id not in self.compiling:
            return  # cancelled meanwhile
        self.compiling.discard(sequence.id)
        if result is None:
            self.waiting.append(sequence)
            return
        self.engine.release(sequence.id)
        if not isinstance(result, RequestError):
            result = RequestError(500, f"The grammar can't be used: {result}")
        self.ctx.fail(sequence.id, result)

    def _grammar_engine(self) -> GrammarEngine:
        """Made in the pool when the first grammar comes; most services never see one."""
        from flowinfer.engine.grammar.guidance import GuidanceEngine
        from flowinfer.engine.hub import resolve
        from flowinfer.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve(self.config.model))
        return GuidanceEngine.of(tokenizer, self.batch.vocab_size, self.batch.eos_token_ids)

    def _proposed(self, proposals: list[Proposal]) -> tuple[Ids, Ids, Ids]:
        """Slots, counts and flat tokens of the proposals, less those whose sequence is gone since."""
        if not proposals:
            return _NONE, _NONE, _NONE
        (proposal,) = proposals
        alive = self.batch.live(proposal.slots, self.ran[proposal.slots])
        if alive.all():
            return proposal.slots, proposal.counts, proposal.tokens
        kept = np.repeat(alive, proposal.counts)
        return proposal.slots[alive], proposal.counts[alive], proposal.tokens[kept]

    def _admit(self) -> None:
        while self.waiting and self.batch.num_free:
            sequence = self.waiting[0]
            if len(sequence.tokens) >= self.batch.max_tokens:
                self._refuse(self.waiting.popleft())
                continue
            if self.engine.held[sequence.id].num_computed < len(sequence.history) - 1:
                self.waiting.popleft()  # whoever had the rest of its KV is gone
                self._queue_to_resume(sequence, sequence.history)
                return
            if not self._place(sequence, sequence.history):
                return
            self.waiting.popleft()

    def _place(self, sequence: Sequence, history: Ids) -> bool:
        """Gives the sequence a slot, once there is a block for its next token."""
        held = self.engine.held[sequence.id]
        if not self.engine.grow(held, len(history)):
            return False
        slot = self.batch.add(sequence, history, np.array(held.blocks, np.int32))
        self.num_admitted += 1
        self.admitted[slot] = self.num_admitted
        return True

    def _refuse(self, sequence: Sequence) -> None:
        self.engine.release(sequence.id)
        text = f"The prompt has {len(sequence.tokens)} tokens; this pipeline decodes up to {self.batch.max_tokens}."
        self.ctx.fail(sequence.id, RequestError(400, text, code="context_length_exceeded", param="messages"))

    def _with_joined(self, slots: Ids, counts: Ids, tokens: Ids) -> tuple[Ids, Ids, Ids]:
        new = self._joined()
        if not new:
            return slots, counts, tokens
        joined = np.array(new, np.int32)
        last = self.batch.tokens[joined, self.batch.num_tokens[joined] - 1]
        return (
            np.concatenate([slots, joined]),
            np.concatenate([counts, np.ones(len(joined), np.int32)]),
            np.concatenate([tokens, last]),
        )

    def _joined(self) -> list[int]:
        """Slots that have come and not run yet."""
        return [slot for slot in self.batch.joined if self.ran[slot] != self.batch.version[slot]]

    # --------------------------------------------------------------------------------------------- who goes elsewhere

    def _depart(self) -> None:
        """Between two steps: sends on those sequences whose turn it is."""
        batch = self.batch
        running = sorted(batch.slot_of, key=lambda request: int(self.admitted[batch.slot_of[request]]))
        waiting = [sequence.id for sequence in self.waiting]
        for request in self.departures.choose([*running, *self.resuming, *waiting]):
            self.departures.send(self._take_out(request))
        self.engine.starved = bool(self.resuming)

    def _take_out(self, request: str) -> Sequence:
        """The sequence as another worker needs it; it's in no queue here any more, but its KV is."""
        held, slot = self.engine.held[request], self.batch.slot_of.get(request)
        if slot is not None:
            sequence, history = self.batch.prompts[slot], self.batch.history(slot)
            held.num_computed = len(history) - 1
            self.batch.remove(slot)
        elif request in self.resuming:
            sequence, history = self.resuming.pop(request)
        else:
            sequence = next(sequence for sequence in self.waiting if sequence.id == request)
            history = sequence.history
            self.waiting.remove(sequence)
        assert sequence is not None, "a slot in use has its sequence"
        held.history = history
        sequence.progress = self.batch.progress_of(sequence, history)
        return sequence

    def _take_home(self, request: str) -> None:
        """The worker whose blocks this sequence reads is about to go: they become ours, if there is room."""
        held, slot = self.engine.held.get(request), self.batch.slot_of.get(request)
        if held is None or slot is None:
            return  # it waits or is computed again: the owner asks again
        history = self.batch.history(slot)
        held.num_computed = len(history) - 1
        if self.engine.take_home(request, history):
            self.batch.blocks[slot, : len(held.blocks)] = held.blocks

    def _take_back(self, request: str) -> bool:
        """A sequence that was offered goes on here; False where it isn't on offer."""
        sequence = self.departures.take_back(request)
        if sequence is not None:
            self.waiting.appendleft(sequence)
        return sequence is not None

    # ---------------------------------------------------------------------------------------------- blocks, preemption

    def _with_room(self, slots: Ids, counts: Ids, tokens: Ids, *, may_preempt: bool = True) -> tuple[Ids, Ids, Ids]:
        """Allocates the blocks that this step writes; while they don't suffice, preempts the youngest.

        Nobody runs where it may not.
        """
        batch = self.batch
        pending = self.overlap.pending(slots, most=True) if self.overlap else 0
        have = batch.num_tokens[slots]
        # Of drafts ahead it isn't known how many will hold; a sequence's last token is never run.
        wanted = np.minimum(have + counts - 1 + pending, np.maximum(batch.limit[slots] - 1, have))
        short = blocks_short(wanted, batch.num_blocks[slots], batch.block_tokens)
        if not short.any():
            return slots, counts, tokens
        if self._grow_all(slots[short > 0], short[short > 0]):
            return slots, counts, tokens
        preempted = False
        for i in np.flatnonzero(short).tolist():
            slot = int(slots[i])
            while batch.ids[slot] is not None and not self._grow(slot, int(wanted[i])):
                if not may_preempt:
                    return _NONE, _NONE, _NONE
                preempted = True
                self._preempt(youngest([s for s in range(batch.max_slots) if batch.ids[s] is not None], self.admitted))
        if not preempted:
            return slots, counts, tokens
        alive = np.array([batch.ids[slot] is not None for slot in slots.tolist()], bool)
        return slots[alive], counts[alive], tokens[np.repeat(alive, counts)]

    def _grow_all(self, slots: Ids, short: Ids) -> bool:
        """Gives each sequence the blocks that it is short of; False, and nobody gets any, where they don't suffice."""
        held = [self.engine.held[self.batch.ids[slot]] for slot in slots.tolist()]
        fresh = grow_all(held, short.tolist(), self.engine.pool)
        if fresh is not None:
            self.batch.append_blocks(slots, short, fresh)
        return fresh is not None

    def _grow(self, slot: int, num_tokens: int) -> bool:
        batch = self.batch
        held = self.engine.held[batch.ids[slot]]  # type: ignore[index]
        if not self.engine.grow(held, num_tokens):
            return False
        known, have = int(batch.num_blocks[slot]), len(held.blocks)
        batch.blocks[slot, known:have] = held.blocks[known:]
        batch.num_blocks[slot] = have
        return True

    def _preempt(self, slot: int) -> None:
        sequence, history = self.batch.prompts[slot], self.batch.history(slot)
        assert sequence is not None, "only slots in use are preempted"
        held = self.engine.held[sequence.id]
        held.num_computed = len(history) - 1
        self.engine.drop_own_blocks(held, history)
        self.batch.remove(slot)
        self._queue_to_resume(sequence, history)
        self.num_preemptions += 1
        metrics.counter("preemptions_total").inc()

    def _queue_to_resume(self, sequence: Sequence, history: Ids) -> None:
        """In front, since it is older than all preempted before; one that is half computed again yields its blocks."""
        for other, tokens in self.resuming.values():
            self.engine.drop_own_blocks(self.engine.held[other.id], tokens)
        self.resuming = {sequence.id: (sequence, history), **self.resuming}
        self.engine.starved = True

    def _displace(self) -> bool:
        """Where nobody runs and whoever is next lacks blocks, the youngest that waits gives back its own: True if so.

        Else those that wait would hold, all together, the blocks that the first of them needs.
        """
        if len(self.batch):
            return False
        next_too = bool(self.resuming)  # else the first that waits is the one that lacks blocks
        for sequence in reversed(list(self.waiting)[0 if next_too else 1 :]):
            held = self.engine.held[sequence.id]
            if len(held.blocks) > held.num_leased:
                self.waiting.remove(sequence)
                self.engine.drop_own_blocks(held, sequence.history)
                self.resuming[sequence.id] = (sequence, sequence.history)
                self.engine.starved = True
                self.num_preemptions += 1
                metrics.counter("preemptions_total").inc()
                return True
        return False

    def _resume(self) -> bool:
        """Computes the oldest preempted sequence again, a chunk a step, and puts it back. True if it got on."""
        if not self.resuming or not self.batch.num_free:
            return False
        id, (sequence, history) = next(iter(self.resuming.items()))
        held, total = self.engine.held[id], len(history) - 1
        if len(held.blocks) == held.num_leased:
            self.engine.reclaim_cached(held)
        if not self.engine.grow(held, len(history)):
            self._give_up_if_alone(sequence, history)
            return False
        if held.num_computed < total:
            end = min(total, held.num_computed + self._chunk(held.num_computed))
            self.engine.run([Run(held, history[held.num_computed : end], held.num_computed)])
            self.engine.cost.observe(*self.engine.last_step)
        if held.num_computed >= total and self._place(sequence, history):
            del self.resuming[id]
            self.engine.starved = bool(self.resuming)
        return True

    def _stall(self) -> None:
        """Nothing could run: ask again soon rather than spin. A block that another stage frees is no event of ours."""
        self.stalled = True
        self.ctx.call_at(self.ctx.clock.now() + _RETRY_S, self._unstall)

    def _unstall(self) -> None:
        self.stalled = False

    def _chunk(self, context: int) -> int:
        return max(self.engine.cost.tokens_within(self.config.resume_budget, context), self.batch.block_tokens)

    def _give_up_if_alone(self, sequence: Sequence, history: Ids) -> None:
        """A sequence that can't go on though nobody else holds a block is longer than the memory."""
        if len(self.batch) or len(self.engine.held) > len(self.resuming):
            return
        del self.resuming[sequence.id]
        self.engine.release(sequence.id, history)
        self.engine.starved = bool(self.resuming)
        text = f"At {len(history)} tokens this sequence outgrew the KV memory of {self.ctx.worker}: raise kv_memory."
        self.ctx.fail(sequence.id, RequestError(503, text, code="kv_exhausted"))

    def _free_finished(self, slot: int) -> None:
        id, history = self.batch.ids[slot], self.batch.history(slot)
        assert id is not None, "only slots in use finish"
        # The last accepted token hasn't been run yet: its KV is the next step's, which there won't be.
        held, prompt = self.engine.held[id], self.batch.prompts[slot]
        held.num_computed = len(history) - 1
        self.engine.release(id, history)
        if self.lower is not None and prompt is not None and held.num_committed > held.num_leased:
            self.lower.keep_output(prompt, held.names[: held.num_committed], held.num_leased)

    # -------------------------------------------------------------------------------------------------------- running

    def _overlap(self) -> Overlap | None:
        """Graphs of the decode step, captured now, where the model has one that can be; else steps run one by one."""
        graphs = self.engine.decode_graphs(self.batch)
        if graphs is None:
            return None
        from flowinfer.stages.moe_decode.overlap import Overlap

        return Overlap(graphs, self.batch)

    def _may_overlap(self, slots: Ids) -> bool:
        """Whether everybody who would run now can do so without the host."""
        assert self.overlap is not None
        new = np.array(self._joined(), np.int32)
        return slots.size + new.size > 0 and self.overlap.fits(slots) and self.overlap.fits(new)

    def _step_ahead(self, overlap: Overlap, slots: Ids) -> Logits | None:
        """Starts steps until two are in flight, then looks at the older one. None once somebody needs the host."""
        while len(overlap.flights) < AHEAD:
            slots = overlap.continuing() if overlap else slots
            if joined := self._joined():
                slots = np.concatenate([slots, np.array(joined, np.int32)])
            if not overlap.fits(slots):
                break
            counts = overlap.counts(slots)
            # A preemption throws away what is in flight: a sequence alone in a full memory would never get on.
            slots, _, _ = self._with_room(slots, counts, np.repeat(slots, counts), may_preempt=not overlap)
            if not slots.size:
                break
            if joined or not overlap:
                self.ran[slots] = self.batch.version[slots]
            overlap.launch(slots)
        if not overlap:
            return None
        self.num_steps += 1
        return overlap.land(self.num_steps)

    def _run(self, slots: Ids, counts: Ids, tokens: Ids) -> Logits:
        """Runs these rows and waits, by a captured step where there is one."""
        batch = self.batch
        judged = self.overlap.judge(slots, counts, tokens) if self.overlap is not None else None
        if judged is None:
            chosen, (logits, features, seconds) = None, self._forward(slots, counts, tokens)
        else:
            chosen, logits, features, seconds = judged
        self.ran[slots] = batch.version[slots]
        self.num_steps += 1
        return Logits(
            step=self.num_steps,
            slots=slots,
            starts=self.query_starts(counts, len(tokens)),
            logits=logits,
            features=features if batch.feature_layers else None,
            chosen=chosen,
            seconds=seconds,
        )

    def _forward(self, slots: Ids, counts: Ids, tokens: Ids) -> tuple[Tensor | None, Tensor | None, float]:
        """Logits, features where a drafter wants them, and seconds of an eager step."""
        batch = self.batch
        if self.overlap is not None:
            self.overlap.graphs.forget(slots)
        kv_lens = (batch.num_tokens[slots] + counts - 1).astype(np.int32)
        tables = batch.blocks[slots, : -(-int(kv_lens.max()) // batch.block_tokens)]
        features = Features(batch.feature_layers) if batch.feature_layers else None
        logits = self.engine.forward(tokens, counts, kv_lens, tables, features=features)
        return logits, features.joined() if features else None, self.engine.last_step[2]


_NONE: Ids = np.zeros(0, np.int32)
_NOBODY = (_NONE, _NONE, _NONE)
