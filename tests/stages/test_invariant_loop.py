"""batch_invariant through the stages: an answer is the same alone, beside others, after hits, drafted and from disk.

The pool is small, so that sequences are preempted and cached blocks evicted on the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_loop import Service, prompt, save_random_llama, save_random_v4
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.message import Serving

VOCAB = 96
KINDS = {"llama": save_random_llama, "v4": save_random_v4}
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module", params=["llama", pytest.param("v4", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    KINDS[request.param](folder, VOCAB, 1024)
    return folder


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


def start(model: Path, kv: Path, *, num_blocks: int = 16, draft: str = "none") -> Service:
    disk = {"disk": {"path": str(kv), "size": "64MiB", "segment": "1MiB", "spare": "0"}}
    lookup = {"tiers": {"write": "all", **disk}}
    running = Service(model, num_blocks=num_blocks, draft=draft, lookup=lookup, invariant=True)
    running.group.emit(Serving())
    return running


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Answer]]:
    """Answers of the texts by themselves, each without a cache."""
    running = start(model, tmp_path_factory.mktemp("alone"), num_blocks=24)
    found = {}
    for seed in range(6):
        running.send(prompt(f"alone{seed}", text(seed), logprobs=0, temperature=temperature(seed)))
        found[seed] = answer(running, f"alone{seed}")
    running.group.close()
    yield found


def text(seed: int) -> list[int]:
    """Prompts that share a beginning in pairs, of 20 to 300 tokens; each repeats itself, so that drafts are right."""
    own, shared = random.Random(seed), random.Random(seed % 3)
    begin = shared.choices(range(3, VOCAB), k=70 * (seed % 3))
    part = own.choices(range(3, VOCAB), k=10 + 9 * seed)
    return begin + part + part


def temperature(seed: int) -> float:
    return 0.8 if seed % 2 else 0.0


def answer(running: Service, id: str) -> Answer:
    tokens = running.finish([id])[id]
    return tokens, [one.logprob for one in running.client.logprobs[id]]


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    order=st.lists(st.integers(0, 5), min_size=3, max_size=7),
    turns=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    budget=st.sampled_from([17, 64, 96, 400]),
    draft=st.sampled_from(["none", "ngram"]),
)
def test_an_answer_is_its_own_in_any_company(
    model: Path, alone: dict[int, Answer], tmp_path: Path, order: list[int], turns: list[int], budget: int, draft: str
) -> None:
    running = start(model, tmp_path / "kv", draft=draft)
    prefill: Any = running.group.by_name["prefill"].stage
    prefill.scheduler.token_budget = budget
    try:
        for number, (seed, count) in enumerate(zip(order, turns, strict=False)):
            running.send(prompt(f"r{number}", text(seed), logprobs=0, temperature=temperature(seed)))
            running.turn(count)
        for number, seed in enumerate(order):
            assert answer(running, f"r{number}") == alone[seed]
    finally:
        running.group.close()


def test_an_answer_from_disk_is_the_cold_one(model: Path, alone: dict[int, Answer], tmp_path: Path) -> None:
    first = start(model, tmp_path / "kv")
    first.send(prompt("a", text(5), logprobs=0, temperature=temperature(5)))
    assert answer(first, "a") == alone[5]
    first.group.close()
    second = start(model, tmp_path / "kv", draft="ngram")
    second.turn(4)
    second.send(prompt("b", text(5), logprobs=0, temperature=temperature(5)))
    try:
        assert answer(second, "b") == alone[5]
        assert second.client.ended["b"].cached_tokens >= 64
    finally:
        second.group.close()
