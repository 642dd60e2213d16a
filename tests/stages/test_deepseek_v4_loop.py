"""prefill, moe-decode and spec-verify on DeepSeek-V4, whose attention carries open groups along: the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from decode_loop import Service, prompt

from flowinfer.message import Prompt

VOCAB, CONTEXT = 96, 512


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def alone(model: Path, prompts: list[Prompt]) -> dict[str, list[int]]:
    """Each prompt by itself in a service of its own."""
    answers = {}
    for one in prompts:
        service = Service(model, num_blocks=8)
        service.send(one)
        answers |= service.finish([one.id])
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_preempted_at_any_length_changes_no_token(model: Path) -> None:
    prompts = [prompt(f"r{n}", some_tokens(n, 60 + 30 * n), max_tokens=70) for n in range(4)]
    service = Service(model, num_blocks=5, draft="ngram")
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == alone(model, prompts)
    assert service.decode.num_preemptions > 0
    assert service.pool.num_free == 5


def test_prefixes_are_reused_in_whole_blocks(model: Path) -> None:
    service = Service(model, num_blocks=32)
    first = prompt("first", some_tokens(1, 150), max_tokens=120)
    service.send(first)
    answer = service.finish(["first"])["first"]
    again = prompt("again", [*first.tokens.tolist(), *answer, *some_tokens(2, 10)])
    service.send(again)
    tokens = service.finish(["again"])
    assert service.client.ended["again"].cached_tokens == 256
    assert tokens == alone(model, [again])


def test_drafts_change_no_token(model: Path) -> None:
    prompts = [
        prompt(f"r{n}", some_tokens(n, 12) * (4 + 3 * n), max_tokens=60, temperature=0.5 * n, seed=n) for n in range(4)
    ]
    service = Service(model, num_blocks=64, draft="ngram")
    service.send(*prompts)
    tokens = service.finish(p.id for p in prompts)
    assert tokens == alone(model, prompts)
    assert sum(service.client.ended[p.id].drafted_tokens for p in prompts) > 0
