"""Log-probabilities of a prompt's own tokens come from prefill: right, whole, and without any reuse of its prefix."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from decode_loop import Service, prompt, save_random_llama

VOCAB, CONTEXT = 96, 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, CONTEXT)
    return folder


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def oracle(model: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(model).eval()(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


@pytest.mark.parametrize("count", [1, 2, 65, 300])
def test_they_are_those_of_transformers(model: Path, count: int) -> None:
    tokens = some_tokens(count, count)
    service = Service(model, num_blocks=32)
    service.send(prompt("r", tokens, max_tokens=1, prompt_logprobs=3))
    service.finish(["r"])
    opening, expected = service.client.opened["r"], oracle(model, tokens)
    assert opening.first_token == tokens[0]
    assert [entry.token for entry in opening.prompt_logprobs] == tokens[1:]
    for row, entry in zip(expected, opening.prompt_logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)


def test_a_cached_prefix_is_not_reused_but_left_for_others(model: Path) -> None:
    tokens = some_tokens(7, 200)
    service = Service(model, num_blocks=32)
    for id, wanted in (("plain", None), ("scored", 0), ("again", None)):
        service.send(prompt(id, tokens, prompt_logprobs=wanted))
        service.finish([id])
    client = service.client
    assert [client.ended[id].cached_tokens for id in ("plain", "scored", "again")] == [0, 0, 192]
    assert len(client.opened["scored"].prompt_logprobs) == 199
    assert not client.opened["plain"].prompt_logprobs
    assert [client.opened[id].stored_tokens for id in ("plain", "again")] == [192, 0]
    assert client.tokens["plain"] == client.tokens["scored"] == client.tokens["again"]
    assert service.pool.num_free == 32


def test_they_dont_wait_for_an_equal_prompt_and_cancels_leave_nothing(model: Path) -> None:
    tokens = some_tokens(8, 400)
    service = Service(model, num_blocks=40)
    service.send(*[prompt(f"r{n}", tokens, prompt_logprobs=1) for n in range(4)])
    service.turn(2)
    service.cancel("r1")
    service.finish(["r0", "r2", "r3"])
    scores = [service.client.opened[id].prompt_logprobs for id in ("r0", "r2", "r3")]
    assert [len(found) for found in scores] == [399] * 3
    prefill = service.group.by_name["prefill"].stage
    assert not prefill.scores._found  # type: ignore[attr-defined]
    assert service.pool.num_free == 40
