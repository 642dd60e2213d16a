"""prefill, kv-transfer, moe-decode, spec-verify together on a small random model: whatever happens, the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from decode_loop import Service, prompt, save_random_llama

from flowinfer.message import Prompt

VOCAB, CONTEXT = 96, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, CONTEXT)
    return folder


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
