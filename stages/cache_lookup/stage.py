"""Tells each prompt what the caches are believed to hold of it. Owns the index of blocks; holds no block itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flowinfer.cache.policies.eviction import Kind
from flowinfer.cache.replay import DEFAULT, Mode
from flowinfer.cache.tiers import RETENTION, STORES, Tiers
from flowinfer.engine.formats import KVDtype, Weights
from flowinfer.errors import ModelError, StageError, TransportError
from flowinfer.message import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Cancel,
    Ended,
    Event,
    Failure,
    PrefixHint,
    Prompt,
    WorkerDown,
)
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.units import Duration

if TYPE_CHECKING:
    from flowinfer.cache.events import BlockEvents
    from flowinfer.channel import Publisher

_REPLAY_S = 0.1  # how soon who asks for missed block events is answered


class Events(StageConfig):
    """port: of the block events, on loopback.  replay_port: where missed ones are asked for.

    form: of an event, `array` as Dynamo and llm-d read it, `map` for what reads with vLLM's newest classes.
    """

    port: int = Field(default=5557, ge=0, le=65_535)
    replay_port: int = Field(default=5558, ge=0, le=65_535)
    form: Literal["array", "map"] = "array"


class CacheLookup(Stage):
    """Finds the longest cached prefix of each prompt; of prompts that share an uncached one, only the first goes on."""

    listens = (BlockStored, BlockRemoved, BlocksCleared, WorkerDown, Failure, Cancel, Ended)

    class Config(StageConfig):
        """model, dtype, weights, kv_dtype: whose KV is looked up, as in prefill.  tiers: where blocks are, how much.

        tiers.memory is the KV memory of this host, in equal parts of the workers that run a model unless their
        kv_memory says otherwise: what no running request holds of it is cache.

        tiers.disk and tiers.object keep blocks over restarts; retention says for how long after their last use, by the
        request's cache_class, where the request itself doesn't (cache_retention). 0 stores nothing of it, not even in
        memory; `default` is for classes that aren't named.

        share_inflight: let prompts wait for a prefix that another one is computing.  wait: for how long at most.

        replay: what becomes of a hit that lacks the window keys at its end, in a model that has windows. exact: layers
        x window tokens are run again, and the answer is that of a cold run.  bounded: one window is, and the answer
        near it.  off: the hit ends where window keys were kept.

        eviction: what goes first when a worker's pool is full, the block unused for longest, or the one that promises
        fewest hits, learned from the traffic.

        events: publish block events for other routers, as vLLM does; off without it.
        """

        model: str = setting("", change="cold")
        dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", change="cold")
        weights: Weights = setting("checkpoint", change="cold")
        kv_dtype: KVDtype = setting("auto", change="cold")
        tiers: Tiers = setting(Tiers(), change="cold")
        retention: dict[str, Duration] = setting(RETENTION, change="cold")
        share_inflight: bool = setting(True, change="live")
        wait: Duration = setting(30.0, change="live")
        eviction: Kind = setting("density", change="cold")
        replay: Mode = setting(DEFAULT, change="cold")
        events: Events | None = setting(None, change="cold")

        def contract(self) -> Contract:
            """Adds prefix; reads the model's shape, not its weights."""
            use = ModelUse(self.model, dtype=self.dtype, packed=self.weights, kv=self.kv_dtype)
            model = use if self.model else None
            return Contract(adds=frozenset({"prefix"}), model=model)

    config: Config

    def open(self) -> None:
        """Names the KV of this model and dtype, so that blocks of any other never match."""
        from flowinfer.cache.disk.retention import Retention
        from flowinfer.cache.index import BlockIndex
        from flowinfer.stages.cache_lookup.policy import SharedPrefix

        self._namespace, self._block_tokens = self._read_layout()
        self.index = BlockIndex(far=STORES)
        self._retention = Retention({**RETENTION, **self.config.retention})
        self.sharing = SharedPrefix(self.index, self.config.wait)
        self._waiting: dict[str, Prompt] = {}
        self._ready: list[Prompt] = []  # let go by a cancel, which can't return messages
        self._publisher: Publisher | None = None
        self._events: BlockEvents | None = None
        if self.config.events:
            self._open_events(self.config.events)

    def close(self) -> None:
        """Stops publishing."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def reconfigure(self, config: Config) -> None:
        """Prompts that come from now on wait so long at most, or not at all."""
        self.sharing.wait_s = config.wait

    def inherit(self, before: Stage) -> None:
        """Knows from the start where blocks are: their events don't come twice."""
        if isinstance(before, CacheLookup) and before._namespace == self._namespace:
            self.index = before.index.copy()
            self.sharing.index = self.index
            if self._events is not None and before._events is not None:
                self._events = before._events  # knows what was told

    @property
    def busy(self) -> bool:
        """While prompts that a cancel let go haven't been sent on."""
        return bool(self._ready)

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        """Fills in `prefix`; keeps back prompts whose prefix is being computed for another one."""
        ready, self._ready = self._ready, []
        yield from map(self._hinted, ready)
        now = self.ctx.clock.now()
        for prompt in prompts:
            prompt.cache_keep_s = self._retention.asked(prompt.cache_class, prompt.cache_keep_s)
            prompt.prefix = PrefixHint(hashes=self._names(prompt))
            if self._events is not None and not prompt.cache_salt:
                self._events.seen(prompt.prefix.hashes, prompt.tokens)
            if self._goes_alone(prompt) or self.sharing.arrive(prompt.id, prompt.prefix.hashes, now):
                yield self._hinted(prompt)
            else:
                self._waiting[prompt.id] = prompt
                self.ctx.call_at(now + self.sharing.wait_s, self._expire)

    def _goes_alone(self, prompt: Prompt) -> bool:
        """Whether it reuses nothing, or stores nothing that others could wait for."""
        logprobs = prompt.sampling.prompt_logprobs is not None
        return not self.config.share_inflight or logprobs or prompt.cache_keep_s == 0

    def observe(self, event: Event) -> Iterable[Prompt] | None:
        """Keeps the index up to date; lets prompts go on whose prefix was stored or whose leader stopped."""
        if self._events is not None:
            self._tell(self._events, event)
        match event:
            case BlockStored(owner=owner, hashes=names):
                self.index.stored(owner, names)
                return self._let_go(self.sharing.stored(names))
            case BlockRemoved(owner=owner, hashes=names):
                self.index.removed(owner, names)
            case BlocksCleared(owner=owner) | WorkerDown(worker=owner):
                self.index.cleared(owner)
            case Failure(id=id):
                return self._let_go(self._stop([id]))
            case Cancel(ids=ids) | Ended(ids=ids):
                return self._let_go(self._stop(ids))
        return None

    def cancel(self, requests: Collection[str]) -> None:
        """Forgets these requests; the oldest prompt that waited for one of them takes its lead."""
        released = self._let_go(self._stop(requests))
        self._ready += released

    def _stop(self, requests: Collection[str]) -> list[str]:
        for request in requests:
            self._waiting.pop(request, None)
        self._ready = [prompt for prompt in self._ready if prompt.id not in requests]
        return self.sharing.stop(requests)

    def _open_events(self, config: Events) -> None:
        from flowinfer.cache.events import BlockEvents
        from flowinfer.channel import Publisher

        key = ("block-events", config.port, config.replay_port)  # the stage that takes over shares it for a while
        publisher = self.ctx.shared(key, lambda: Publisher(config.port, config.replay_port), arms=True)
        try:
            publisher.open()
        except TransportError as error:
            raise StageError(
                self.ctx.stage, f"events: {error.message}", help="Set events.port to a free one."
            ) from error
        model = self.config.model
        self._publisher = publisher
        self._events = BlockEvents(
            self._block_tokens,
            lambda owner, batch: publisher.publish(f"kv@{owner}@{model}", batch),
            self.ctx.clock.wall,
            config.form,
        )
        self._answer()

    def _answer(self) -> None:
        if self._publisher is not None:
            self._publisher.answer()
            self.ctx.call_at(self.ctx.clock.now() + _REPLAY_S, self._answer)

    @staticmethod
    def _tell(events: BlockEvents, event: Event) -> None:
        match event:
            case BlockStored(owner=owner, hashes=names):
                events.stored(owner, names)
            case BlockRemoved(owner=owner, hashes=names):
                events.removed(owner, names)
            case BlocksCleared(owner=owner) | WorkerDown(worker=owner):
                events.cleared(owner)

    def _expire(self) -> list[Prompt]:
        return self._let_go(self.sharing.expire(self.ctx.clock.now()))

    def _let_go(self, requests: list[str]) -> list[Prompt]:
        return [self._hinted(self._waiting.pop(request)) for request in requests]

    def _names(self, prompt: Prompt) -> list[bytes]:
        """Prefill computes every token but the last, so only full blocks before it can be reused."""
        from flowinfer.cache.keys import chain_hashes

        return chain_hashes(
            prompt.tokens[:-1], namespace=self._namespace, salt=prompt.cache_salt, block_tokens=self._block_tokens
        )

    def _hinted(self, prompt: Prompt) -> Prompt:
        """The prompt with what the index knows now."""
        assert prompt.prefix is not None
        prompt.prefix.owners = self.index.longest_prefix(prompt.prefix.hashes)
        return prompt

    def _read_layout(self) -> tuple[str, int]:
        from flowinfer.engine import hub

        if not self.config.model:
            raise StageError(self.ctx.stage, "no model is set.", help="Set `model:` to the model that prefill runs.")
        try:
            kernels = getattr(self.ctx, "kernels", "")
            info, config = hub.describe(hub.resolve(self.config.model)), self.config
            layout = info.layout(config.dtype, kernels=kernels, weights=config.weights, kv=config.kv_dtype)
        except ModelError as error:
            raise StageError(self.ctx.stage, error.message, help=error.help) from error
        return layout.namespace(approximate=self.config.replay == "bounded"), layout.block_tokens
