"""prefill, moe-decode and spec-verify on DeepSeek-V4, whose attention carries open groups along: the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from decode_loop import Service, prompt, save_random_v4

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
    folder = tmp_path_factory.mktemp("v4")
    save_random_v4(folder, VOCAB, CONTEXT)
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
