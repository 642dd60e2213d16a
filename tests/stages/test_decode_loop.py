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


# --------------------------------------------------------------------- a family whose attention carries open groups along


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("v4")
    config = DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        num_hash_layers=1,
        max_position_embeddings=CONTEXT,
        qk_rope_head_dim=8,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    DeepseekV4ForCausalLM(config).save_pretrained(folder)
    return folder


def test_v4_preempted_at_any_length_changes_no_token(v4: Path) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, 60 + 30 * n), max_tokens=70) for n in range(4)]
    service = Service(v4, num_blocks=5, draft="ngram")
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == alone(v4, prompts)
    assert service.decode.num_preemptions > 0
    assert service.pool.num_free == 5


def test_v4_prefixes_are_reused_in_whole_blocks(v4: Path) -> None:
    service = Service(v4, num_blocks=32)
    first = prompt("first", some_tokens(1, 150), max_tokens=120)
    service.send(first)
    answer = service.finish(["first"])["first"]
    again = prompt("again", [*first.tokens.tolist(), *answer, *some_tokens(2, 10)])
    service.send(again)
    tokens = service.finish(["again"])
    assert service.client.ended["again"].cached_tokens == 256
    assert tokens == alone(v4, [again])


def test_v4_drafts_change_no_token(v4: Path) -> None:
    prompts = [
        prompt(f"r{n}", some_tokens(n, 12) * (4 + 3 * n), max_tokens=60, temperature=0.5 * n, seed=n) for n in range(4)
    ]
    service = Service(v4, num_blocks=64, draft="ngram")
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    assert tokens == alone(v4, prompts)
    assert sum(service.client.ended[p.id].drafted_tokens for p in prompts) > 0
