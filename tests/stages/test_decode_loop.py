"""prefill, kv-transfer, moe-decode, spec-verify together on a small random model: whatever happens, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowinfer.engine.layout import KVLayout
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Cancel, Ended, Event, Failure, Message, Prompt, Sampling, Tokens
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.group import Group, Host
from flowinfer.runtime.loading import load_class
from flowinfer.stage import Arena, Stage

VOCAB, CONTEXT = 96, 512


class Client(Stage):
    """Sends prompts and keeps the tokens that come back."""

    kind = "api"
    listens = (Failure,)

    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        self.outbox: list[Prompt] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    def step(self, tokens: list[Tokens]) -> Iterable[Prompt]:
        for batch in tokens:
            ends = np.cumsum(batch.counts)
            for i, id in enumerate(batch.ids):
                new = batch.tokens[ends[i] - batch.counts[i] : ends[i]].tolist()
                self.tokens.setdefault(id, []).extend(new)
                if i in batch.finished:
                    assert id not in self.ended, "a request ends once"
                    self.ended[id] = batch.finished[i]
                    self.ctx.send(Ended(ids=[id]))
        prompts, self.outbox = self.outbox, []
        return prompts

    def observe(self, event: Event) -> Iterable[Message] | None:
        assert isinstance(event, Failure)
        self.ended[event.id] = event
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    yield folder


EDGES = (
    ("api", "lookup", "Prompt", "prompts"),
    ("lookup", "prefill", "Prompt", "prompts"),
    ("prefill", "transfer", "Sequence", "sequences"),
    ("transfer", "decode", "Sequence", "sequences"),
    ("decode", "verify", "Logits", "logits"),
    ("verify", "decode", "Proposal", "proposals"),
    ("verify", "api", "Tokens", "tokens"),
)


class Service:
    """The five stages in one group over `num_blocks` blocks."""

    def __init__(self, model: Path, *, num_blocks: int, draft: str = "none", **decode: Any) -> None:
        named = {"model": str(model), "dtype": "float32"}
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "api": ("api", {}),
            "lookup": ("cache-lookup", named),
            "prefill": ("prefill", {**named, "token_budget": 96}),
            "transfer": ("kv-transfer", named),
            "decode": ("moe-decode", {**named, "max_batch": 8, **decode}),
            "verify": ("spec-verify", {"draft": draft}),
        }
        stages = {n: StagePlan(name=n, kind=k, config=c, worker="front") for n, (k, c) in kinds.items()}
        edges = tuple(
            EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=m, port=p, fused=True, back=m == "Proposal")
            for a, b, m, p in EDGES
        )
        workers = {"front": WorkerPlan(name="front", stages=tuple(stages))}
        plan = Plan(name="t", digest="", file="", stages=stages, edges=edges, workers=workers)

        def arena(layout: KVLayout) -> Arena:
            return Arena(memoryview(bytearray(num_blocks * layout.block_bytes)), num_blocks, 0, num_blocks)

        self.group = Group(
            plan,
            list(stages.values()),
            Host(arena=arena),
            lambda stage: Client if stage.kind == "api" else load_class(stage.kind),
            name="front.0",
            generation=1,
            clock=SystemClock(),
        )
        self.group.open()
        self.client: Client = self.group.by_name["api"].stage  # type: ignore[assignment]
        self.decode: Any = self.group.by_name["decode"].stage
        self.pool = self.decode.engine.pool

    def send(self, *prompts: Prompt) -> None:
        self.client.outbox.extend(prompts)

    def cancel(self, *ids: str) -> None:
        for id in ids:
            self.client.ended.setdefault(id, "cancelled")
        self.group.emit(Cancel(ids=list(ids)))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.group.turn()

    def finish(self, ids: Iterable[str], turns: int = 40_000) -> dict[str, list[int]]:
        ids = list(ids)
        for _ in range(turns):
            if all(id in self.client.ended for id in ids):
                self.turn(2)
                return {id: self.client.tokens.get(id, []) for id in ids}
            self.group.turn()
        raise AssertionError(f"not ended: {[id for id in ids if id not in self.client.ended]}")


def prompt(id: str, tokens: Iterable[int], max_tokens: int = 24, **sampling: Any) -> Prompt:
    options = {"temperature": 0.0, "ignore_eos": True, "seed": 7, **sampling}
    return Prompt(id=id, tokens=np.array(list(tokens), np.int32), sampling=Sampling(max_tokens=max_tokens, **options))


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def alone(model: Path, prompts: list[Prompt]) -> dict[str, list[int]]:
    """Each prompt by itself, with all the memory it may want and an empty cache."""
    service = Service(model, num_blocks=32)
    answers = {}
    for one in prompts:
        service.pool.clear_cache()
        service.send(one)
        answers |= service.finish([one.id])
    return answers


def test_one_token_prompt_and_block_boundaries(model: Path) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, n)) for n in (1, 2, 63, 64, 65, 66, 128, 129)]
    service = Service(model, num_blocks=64)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == alone(model, prompts)
    assert service.pool.num_free == 64


def test_running_out_of_blocks_preempts_and_changes_no_token(model: Path) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, 40 + n), max_tokens=120) for n in range(6)]
    service = Service(model, num_blocks=8)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == alone(model, prompts)
    assert service.decode.num_preemptions > 0
    assert service.pool.num_free == 8


def test_the_next_turn_hits_what_decode_wrote(model: Path) -> None:
    service = Service(model, num_blocks=32)
    first = prompt("first", some_tokens(1, 100), max_tokens=100)
    service.send(first)
    answer = service.finish(["first"])["first"]
    again = prompt("again", [*first.tokens.tolist(), *answer, *some_tokens(2, 10)])
    service.send(again)
    tokens = service.finish(["again"])
    assert service.client.ended["again"].cached_tokens == 192
    assert tokens == alone(model, [again])


def test_equal_prompts_at_once_are_computed_once(model: Path) -> None:
    shared = some_tokens(3, 200)
    prompts = [prompt(f"r{n}", [*shared, n + 3]) for n in range(6)]
    service = Service(model, num_blocks=64)
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    cached = sorted(service.client.ended[p.id].cached_tokens for p in prompts)
    assert cached == [0, 192, 192, 192, 192, 192]
    assert tokens == alone(model, prompts)


def test_other_tenants_dont_share(model: Path) -> None:
    tokens = some_tokens(4, 150)
    service = Service(model, num_blocks=64)
    for salt in ("a", "b", "a"):
        one = prompt(f"r{len(service.client.ended)}", tokens)
        one.cache_salt = salt
        service.send(one)
        service.finish([one.id])
    assert [end.cached_tokens for end in service.client.ended.values()] == [0, 0, 128]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_token(model: Path, temperature: float) -> None:
    prompts = [
        prompt(f"r{n}", some_tokens(n, 12) * 6, max_tokens=60, temperature=temperature, seed=n) for n in range(5)
    ]
    service = Service(model, num_blocks=64, draft="ngram")
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    assert tokens == alone(model, prompts)
    assert sum(service.client.ended[p.id].drafted_tokens for p in prompts) > 0


def test_a_prompt_longer_than_the_memory_is_refused_by_name(model: Path) -> None:
    service = Service(model, num_blocks=4)
    service.send(prompt("long", some_tokens(1, 300)))
    service.finish(["long"])
    failure = service.client.ended["long"]
    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert "kv_memory" in failure.message


def test_a_sequence_that_outgrows_the_memory_fails_and_frees_it(model: Path) -> None:
    service = Service(model, num_blocks=4)
    service.send(prompt("grows", some_tokens(1, 100), max_tokens=400))
    service.finish(["grows"])
    assert service.client.ended["grows"].code == "kv_exhausted"
    service.turn(2)
    assert service.pool.num_free == 4


@pytest.mark.parametrize("seed", range(6))
def test_random_cancels_leave_every_block_free_and_every_answer_right(model: Path, seed: int) -> None:
    """Tiny pool, shared prefixes, cancels at any moment."""
    rng = random.Random(seed)
    stems = [some_tokens(100 + i, 150) for i in range(3)]
    prompts = []
    for n in range(20):
        tokens = [*rng.choice(stems)[: rng.randrange(1, 150)], *some_tokens(n, rng.randrange(1, 20))]
        prompts.append(prompt(f"r{n}", tokens, max_tokens=rng.randrange(1, 90), temperature=rng.choice([0.0, 0.8])))
    service = Service(model, num_blocks=9, draft=rng.choice(["none", "ngram"]))
    victims = rng.sample([p.id for p in prompts], 8)
    for one in prompts:
        service.send(one)
        service.turn(rng.randrange(0, 12))
        if victims and rng.random() < 0.5:
            service.cancel(victims.pop())
    for id in victims:
        service.turn(rng.randrange(0, 12))
        service.cancel(id)
    tokens = service.finish(p.id for p in prompts)
    survivors = [p for p in prompts if service.client.ended[p.id] != "cancelled"]
    assert survivors
    expected = alone(model, survivors)
    assert {p.id: tokens[p.id] for p in survivors} == expected
    assert service.pool.num_free == 9
    assert not service.decode.engine.held
