"""Computes the KV of prompts, a time budget at a time, and lends it to the worker that decodes them.

Every token but the last is run here; decode's first step runs the last one, so that sampling lives in one place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

from flowinfer.cache.tiers import STORES
from flowinfer.engine.formats import KVDtype, Weights
from flowinfer.engine.held import KV_EVENTS, Run
from flowinfer.errors import RequestError
from flowinfer.message import (
    Event,
    KVPin,
    KVPinned,
    KVRecall,
    KVRelease,
    KVUnpin,
    Leave,
    Message,
    Prompt,
    Replay,
    Sequence,
    Serving,
    WorkerDown,
    WorkerUp,
)
from flowinfer.observe import metrics
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.prefill.policy import auto_budget
from flowinfer.units import Duration, TokenCount

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.held import HeldKV
    from flowinfer.engine.lower_tiers import LowerTiers, Restored

_RETRY_S = (
    0.005  # how soon a prompt that found no credit or no block asks again; a freed block isn't an event of its own
)

_RECALLED = 8  # requests whose blocks one worker is asked to copy at once: a copy of one costs it milliseconds
_RECALL_S = 0.05


class Prefill(Stage):
    """Runs prompts in chunks that fit the step budget, fair over buckets, and hands each over once it is computed."""

    listens = (KVPinned, Serving, Replay, Leave, *KV_EVENTS)

    class Config(StageConfig):
        """model: name, folder, GGUF or hub id.  dtype: of weights and KV; auto is the checkpoint's own.

        weights: checkpoint, or what a CPU makes of them as they are loaded: int8 or int4 for few rows, with a copy in
        dtype for many, but where tiles of bytes serve all (see moe-decode); int8-only and int4-only do without that
        copy; fp8 on a GPU.  kv_dtype: fp8 keeps keys and values in a byte each, on a GPU.

        step_budget: longest time that one step may keep the device; auto: 50ms, or where that is more, sixteen times
        what a step costs however short, and six times a decode step on a CPU (64 times the shortest while nothing
        decodes on the device); 500ms at most.
        token_budget: a fixed number of tokens a step instead, for comparison.  max_prompts: prompts being computed at
        once.  wait: longest wait for KV blocks.  pin_timeout: longest wait for another worker's cached prefix before it
        is computed again.
        """

        model: str = setting("", change="cold")
        dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", change="cold")
        weights: Weights = setting("checkpoint", change="cold")
        kv_dtype: KVDtype = setting("auto", change="cold")
        step_budget: Duration | Literal["auto"] = setting("auto", change="live")
        token_budget: TokenCount | None = setting(None, change="live")
        max_prompts: int = setting(64, change="live")
        wait: Duration = setting(60.0, change="live")
        pin_timeout: Duration = setting(1.0, change="live")

        def contract(self) -> Contract:
            """Adds kv; gives credit back when a prompt has left; takes decode's block credit before it starts one."""
            return Contract(
                adds=frozenset({"kv"}),
                model=ModelUse(self.model, weights=True, dtype=self.dtype, packed=self.weights, kv=self.kv_dtype),
                held=frozenset({"prompts"}),
                reserves=True,
                reads=frozenset({"cache-lookup"}),
            )

    config: Config
    engine: Engine
    lower: LowerTiers | None

    def open(self) -> None:
        """Loads the model."""
        from flowinfer.engine.engine import Engine
        from flowinfer.engine.lower_tiers import LowerTiers
        from flowinfer.stages.prefill.policy import PrefillScheduler
        from flowinfer.stages.prefill.scoring import PromptScores

        own = self.config
        self.engine = Engine.of(self.ctx, own.model, own.dtype, own.weights, own.kv_dtype)
        self.lower = LowerTiers.of(self.ctx, self.engine)
        self.scores = PromptScores(self.engine)
        self.scheduler = PrefillScheduler(token_budget=self.config.token_budget)
        self.waiting: dict[str, Prompt] = {}
        self.since: dict[str, float] = {}
        self.prompts: dict[str, Prompt] = {}
        self.lessee: dict[str, str] = {}
        self.pinning: dict[str, str] = {}  # request -> the worker asked for its cached blocks
        self.restoring: set[str] = set()  # requests whose blocks are being read from lower tiers
        self.ready: list[str] = []  # computed, but the worker that was to decode them died
        self.blocked = False
        self.sent: dict[str, str] = {}  # to which worker each sequence went that isn't over
        self.leaving = False  # what isn't computed yet is another worker's
        self.recalling = False  # whoever reads our blocks shall copy them

    def reconfigure(self, config: Config) -> None:
        """Fills the next step by these budgets."""
        self.scheduler.token_budget = config.token_budget

    def close(self) -> None:
        """Lets the lower tiers write what they have, and ends what is pushed."""
        self.engine.outgoing.close()
        if self.lower is not None:
            self.lower.close()

    @property
    def busy(self) -> bool:
        """While a prompt can be computed, or one waits that hasn't just been found not to fit."""
        return self.scheduler.has_work or (bool(self.waiting or self.ready) and not self.blocked)

    def step(self, prompts: list[Prompt]) -> Iterable[Sequence]:
        """Admits what fits, runs one budget's worth of chunks, hands over what is complete."""
        now = self.ctx.clock.now()
        for prompt in prompts:
            self.waiting[prompt.id], self.since[prompt.id] = prompt, now
        if self.leaving:
            self._send_away()
        yield from self._retry_ready(now)
        yield from self._admit(now)
        for request in self._run_chunks():
            yield from self._hand_over(request)

    def observe(self, event: Event) -> Iterable[Message] | None:
        """Copies pinned blocks as they are granted; the rest is the engine's."""
        if isinstance(event, KVPinned):
            return self._take_pinned(event)
        if isinstance(event, Replay):
            self._take_replay(event.prompt)
        if isinstance(event, Leave):
            self.leaving = event.mode == "replay"
            self._begin_recall(event.mode != "stay")
        if isinstance(event, WorkerDown):
            self._lose_lessee(event.worker)
        self.engine.observe(event, by=self)
        if self.lower is not None:
            self._tell_lower(self.lower, event)
        return None

    def cancel(self, requests: Collection[str]) -> None:
        """Forgets prompts; frees their blocks unless they are already lent."""
        for request in requests:
            self.sent.pop(request, None)
            if request in self.waiting or request in self.prompts:
                self._forget(request)
                self.engine.release(request)

    # ------------------------------------------------------------------------------------------------------ admission

    def _admit(self, now: float) -> Iterable[Sequence]:
        self.blocked = False
        full: set[tuple[str | None, str]] = set()
        for prompt in list(self.waiting.values()):
            if (prompt.bucket, prompt.arm) in full or len(self.prompts) >= self.config.max_prompts:
                continue
            if self._hold(prompt):
                del self.waiting[prompt.id]
                yield from self._start(prompt)
            elif prompt.id in self.waiting:
                full.add((prompt.bucket, prompt.arm))  # first come, first served inside a bucket
        if full:
            self._wait(now)

    def _hold(self, prompt: Prompt) -> bool:
        """Takes decode's credit and our blocks, both or neither."""
        needed = self.engine.layout.blocks_for(len(prompt.history)) + 1
        if needed > self.engine.pool.num_blocks:
            self._refuse(prompt, needed)
            return False
        if self.engine.starved or prompt.id in self.engine.held:  # of a replay: not given back yet
            return False
        lessee = self.ctx.reserve("sequence", prompt.id, needed)
        if lessee is None:
            return False
        if self.engine.start(prompt) is None:
            self.ctx.unreserve("sequence", prompt.id)
            return False
        self.lessee[prompt.id] = lessee
        return True

    def _refuse(self, prompt: Prompt, needed: int) -> None:
        del self.waiting[prompt.id]
        self._forget(prompt.id)
        room = self.engine.pool.num_blocks * self.engine.layout.block_tokens
        text = f"The prompt has {len(prompt.history)} tokens; this worker's KV memory holds {room}. Raise kv_memory."
        self.ctx.fail(prompt.id, RequestError(400, text, code="context_length_exceeded", param="messages"))

    def _wait(self, now: float) -> None:
        self.blocked = True
        for prompt in self.waiting.values():
            if prompt.arm:  # what waits for an experiment's arm B keeps nothing of arm A's out
                self.ctx.give_back("prompts", prompt.id)
        for request in [
            id for id, since in self.since.items() if id in self.waiting and now - since > self.config.wait
        ]:
            self._forget(request)
            text = f"No KV blocks became free for this request in {self.config.wait:g} s."
            self.ctx.fail(request, RequestError(503, text, code="kv_exhausted", retry_after_s=self.config.wait))
        self.ctx.call_at(now + _RETRY_S, self._unblock)

    def _unblock(self) -> None:
        self.blocked = False

    def _start(self, prompt: Prompt) -> Iterable[Sequence]:
        self.prompts[prompt.id] = prompt
        held, lessee = self.engine.held[prompt.id], self.lessee[prompt.id]
        if lessee != self.ctx.worker:
            self.engine.outgoing.offer(prompt, len(prompt.history) - 1, lessee)
        reuses = prompt.sampling.prompt_logprobs is None
        if reuses and (self._pin_elsewhere(prompt, held) or self._restore(prompt, held)):
            return
        yield from self._schedule(prompt, held)

    def _schedule(self, prompt: Prompt, held: HeldKV) -> Iterable[Sequence]:
        self.engine.prefixes.settle(held)
        total = len(prompt.history) - 1
        if held.num_computed >= total:
            yield from self._hand_over(prompt.id)
        else:
            self.scheduler.add(prompt.id, prompt.bucket, total, held.num_computed)
            self.engine.outgoing.advance(held)  # what is cached can go while the rest is computed

    # ------------------------------------------------------------------------------- prefixes cached by another worker

    def _pin_elsewhere(self, prompt: Prompt, held: HeldKV) -> bool:
        """Asks the owner of the next cached blocks to hold them, where its memory is ours to read."""
        if prompt.prefix is None or not self.engine.shares_memory:
            return False
        at, owners = held.num_found, prompt.prefix.owners
        if at >= len(owners) or owners[at] in (self.ctx.worker, *STORES):
            return False
        end = next((i for i in range(at, len(owners)) if owners[i] != owners[at]), len(owners))
        self.pinning[prompt.id] = owners[at]
        self.ctx.send(KVPin(id=prompt.id, reader=self.ctx.worker, hashes=prompt.prefix.hashes[at:end]), to=owners[at])
        give_up_at = self.ctx.clock.now() + self.config.pin_timeout
        self.ctx.call_at(give_up_at, lambda: self._give_up_pin(prompt.id), request=prompt.id)
        return True

    def _take_pinned(self, event: KVPinned) -> Iterable[Sequence]:
        if self.pinning.pop(event.id, None) is not None:
            prompt, held = self.prompts[event.id], self.engine.held[event.id]
            self.engine.prefixes.take_pinned(held, event.blocks, event.partial)
            if not self._restore(prompt, held):
                yield from self._schedule(prompt, held)
        self.ctx.send(KVUnpin(id=event.id, reader=self.ctx.worker), to=event.owner)

    def _give_up_pin(self, request: str) -> Iterable[Sequence]:
        if self.pinning.pop(request, None) is not None:
            yield from self._schedule(self.prompts[request], self.engine.held[request])

    # ------------------------------------------------------------------------------------------ prefixes in lower tiers

    def _restore(self, prompt: Prompt, held: HeldKV) -> bool:
        """Asks the lower tiers for the blocks that neither this worker nor another has."""
        then = partial(self._restored, prompt.id)
        if self.lower is None or not self.lower.restore(prompt, held, then):
            return False
        self.restoring.add(prompt.id)
        return True

    def _restored(self, request: str, restored: Restored) -> Iterable[Sequence]:
        if request not in self.restoring:
            return  # cancelled meanwhile
        self.restoring.remove(request)
        prompt, held = self.prompts[request], self.engine.held[request]
        self.engine.prefixes.take_restored(held, restored.num_blocks, restored.states)
        yield from self._schedule(prompt, held)

    def _tell_lower(self, lower: LowerTiers, event: Event) -> None:
        """What decode filled is worth keeping; who has just begun to listen must hear what is there."""
        if isinstance(event, KVRelease):
            lower.returned(event.id, [name for _, name in event.commits])
        elif isinstance(event, Serving):
            lower.announce()
        elif isinstance(event, WorkerUp):
            lower.announce(to=event.worker)

    # -------------------------------------------------------------------------------------------- running and lending

    def _run_chunks(self) -> list[str]:
        """Runs one step; returns the requests that it completed."""
        chunks = self.scheduler.plan(self._budget_s, self.engine.cost)
        if not chunks:
            return []
        runs = [
            Run(self.engine.held[c.id], self.prompts[c.id].history[c.start : c.start + c.count], c.start)
            for c in chunks
        ]
        if plain := [run for run in runs if not self._is_scored(run)]:
            self.engine.run(plain)
            self.engine.cost.observe(*self.engine.last_step)
        for run in filter(self._is_scored, runs):
            self.scores.run(run, self.prompts[run.held.id])
        for run in runs:
            self.engine.commit(run.held, self.prompts[run.held.id].history)
        done = [chunk.id for chunk in chunks if self.scheduler.advance(chunk.id, chunk.count)]
        for run in runs:
            if run.held.id not in done:  # whose last blocks go with the hand-over
                self.engine.outgoing.advance(run.held)
        return done

    @property
    def _budget_s(self) -> float:
        wanted = self.config.step_budget
        if wanted != "auto":
            return wanted
        own = (held.lessee is None and id not in self.prompts for id, held in self.engine.held.items())
        return auto_budget(self.engine.cost.coefficients[0], decoding=any(own), decode_s=self.engine.decode_s)

    def _is_scored(self, run: Run) -> bool:
        return self.prompts[run.held.id].sampling.prompt_logprobs is not None

    def _hand_over(self, request: str) -> Iterable[Sequence]:
        prompt, lessee = self.prompts[request], self.lessee.get(request)
        if lessee is None:
            self.ready.append(request)
            return
        kv = self.engine.lend(request, lessee)
        if self.lower is not None:
            held = self.engine.held[request]
            self.lower.keep_prompt(prompt, held.names[: held.num_committed])
        metrics.counter("prefix_cache_queries_tokens_total").inc(len(prompt.history))
        metrics.counter("prefix_cache_hits_tokens_total").inc(kv.cached_tokens)
        scores = self.scores.take(request)
        self._forget(request, sent=True)
        self.sent[request] = lessee
        fields = {name: getattr(prompt, name) for name in Prompt.__struct_fields__}
        yield Sequence(**fields, kv=kv, prompt_logprobs=scores)

    # ------------------------------------------------------------------------------------- sequences that run already

    def _take_replay(self, prompt: Prompt) -> None:
        """A sequence that ran in a worker that is about to go: computed again, with its answer so far."""
        if prompt.id not in self.prompts and self.ctx.take_over(prompt.id):
            self.waiting[prompt.id], self.since[prompt.id] = prompt, self.ctx.clock.now()
            self.blocked = False

    def _send_away(self) -> None:
        """Gives prompts that aren't computed yet to another prefill worker, if there is one."""
        others = self.ctx.instances("prefill")
        for number, request in enumerate([*self.waiting, *self.prompts] if others else ()):
            prompt = self.waiting.get(request) or self.prompts[request]
            self._forget(request)
            self.engine.release(request)
            to = others[number % len(others)]
            self.ctx.hand_on(request, to)
            self.ctx.send(Replay(prompt=prompt), to=to)

    def _begin_recall(self, wanted: bool) -> None:
        begins, self.recalling = wanted and not self.recalling, wanted
        if begins:
            self._recall()

    def _recall(self) -> None:
        """Asks those that decode from our blocks to copy them, some at a time; what nobody reads, we are done with."""
        if not self.recalling:
            return
        asked: dict[str, list[str]] = {}
        for request, lessee in list(self.sent.items()):
            held = self.engine.held.get(request)
            if held is None or held.lessee is None:
                del self.sent[request]
                if lessee != self.ctx.worker:
                    self.ctx.hand_on(request)
            elif len(asked.setdefault(lessee, [])) < _RECALLED:
                asked[lessee].append(request)
        for lessee, requests in asked.items():
            self.ctx.send(KVRecall(ids=requests), to=lessee)
        self.ctx.call_at(self.ctx.clock.now() + _RECALL_S, self._recall)

    def _lose_lessee(self, worker: str) -> None:
        """Prompts bound for a worker that died look for another when they are computed; that death isn't theirs."""
        for request in [id for id, lessee in self.lessee.items() if lessee == worker]:
            self.ctx.unreserve("sequence", request)
            del self.lessee[request]

    def _retry_ready(self, now: float) -> Iterable[Sequence]:
        requests, self.ready = self.ready, []
        for request in requests:
            needed = self.engine.layout.blocks_for(len(self.prompts[request].history)) + 1
            if lessee := self.ctx.reserve("sequence", request, needed):
                self.lessee[request] = lessee
            yield from self._hand_over(request)
        if self.ready:
            self._wait(now)

    def _forget(self, request: str, *, sent: bool = False) -> None:
        self.waiting.pop(request, None)
        self.since.pop(request, None)
        self.pinning.pop(request, None)
        self.restoring.discard(request)
        self.ready = [id for id in self.ready if id != request]
        self.scheduler.remove(request)
        self.scores.take(request)
        if self.prompts.pop(request, None) is not None and not sent:
            self.ctx.unreserve("sequence", request)
        self.lessee.pop(request, None)
        self.ctx.give_back("prompts", request)
