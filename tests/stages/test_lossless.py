"""Speculation in the decode loop loses nothing: tokens, log-probabilities and distributions are those without it."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import Service, prompt, save_random_llama
from drafters import save_random_head
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flowinfer.message import Grammar, Prompt

VOCAB, CONTEXT = 261, 512
NAMES = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 1.5},
    "filtered": {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.4},
    "greedy penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "grammar": {"temperature": 1.0, "grammar": Grammar("regex", "(ab|ba|c[a-c]{2}){4,9}"), "ignore_eos": False},
}
DRAFTS = {
    "ngram": {"draft": "ngram", "ngram_min": 1},
    "suffix": {"draft": "suffix"},
    "head": {"draft": "head"},
    "itself": {"draft": "model", "draft_model": "self"},
    "another model": {"draft": "model", "draft_model": "other"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models over bytes; the first has an untrained draft head."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(NAMES)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(NAMES[:3])
    for seed, name in enumerate(("self", "other")):
        (path / name).mkdir()
        save_random_llama(path / name, VOCAB, CONTEXT)
        tokenizer.save(str(path / name / "tokenizer.json"))
        if seed:
            disturb(path / name / "model.safetensors")
    save_random_head(path / "self", path / "self" / "draft.safetensors")
    return path


def disturb(file: Path) -> None:
    """A model that is like the other one, but not the same: some of its drafts hold."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    weights = load_file(file)
    for name, weight in weights.items():
        weights[name] = weight + 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, file, metadata={"format": "pt"})


def service(folder: Path, **verify: Any) -> Service:
    named = verify.get("draft_model")
    settings = {**verify, "draft_model": str(folder / named)} if named else verify
    return Service(folder / "self", num_blocks=160, draft=settings.pop("draft", "none"), verify=settings, max_batch=48)


def requests(**sampling: Any) -> list[Prompt]:
    """One of each kind of settings, with texts that repeat themselves."""
    found = []
    for n, (name, options) in enumerate(SETTINGS.items()):
        rng = random.Random(n)
        words = [rng.choices(range(40, 120), k=3) for _ in range(4)]
        text = [token for word in rng.choices(words, k=10 + n) for token in word]
        found.append(prompt(name, text, max_tokens=24, **{"seed": n, **options, **sampling}))
    return found


def answers(one: Service, prompts: list[Prompt]) -> dict[str, list[int]]:
    one.send(*prompts)
    found = one.finish((p.id for p in prompts), seconds=300)
    one.turn(2)
    assert one.pool.num_free == one.pool.num_blocks
    return found


def share(one: Service, prompts: list[Prompt]) -> tuple[int, int]:
    ends = [one.client.ended[p.id] for p in prompts]
    return sum(end.drafted_tokens for end in ends), sum(end.accepted_tokens for end in ends)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Service:
    one = service(folder)
    answers(one, requests(logprobs=3))
    return one


@pytest.mark.parametrize(("draft", "schedule"), list(product(DRAFTS, ("fixed", "confidence"))))
def test_tokens_and_logprobs_are_those_without_drafts(
    folder: Path, plain: Service, draft: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    prompts = requests(logprobs=3)
    one = service(folder, schedule=schedule, tokens=5, **DRAFTS[draft])
    assert answers(one, prompts) == {p.id: plain.client.tokens[p.id] for p in prompts}
    for p in prompts:
        ours, theirs = one.client.logprobs[p.id], plain.client.logprobs[p.id]
        assert [entry.token for entry in ours] == [entry.token for entry in theirs] == plain.client.tokens[p.id]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
        for a, b in zip(ours, theirs, strict=True):
            assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)
    drafted, accepted = share(one, prompts)
    if schedule == "fixed":
        assert drafted > 10
    if draft == "itself":
        assert accepted >= 0.99 * drafted, "a model agrees with itself, whatever the settings"
    if draft == "another model" and schedule == "fixed":
        assert 0.02 * drafted < accepted < 0.95 * drafted, "drafts that always or never hold show little"


@pytest.mark.parametrize("draft", DRAFTS)
def test_preempted_and_cancelled_sequences_free_what_drafts_hold(folder: Path, draft: str) -> None:
    one = service(folder, schedule="fixed", tokens=5, **DRAFTS[draft])
    prompts = requests()
    one.send(*prompts)
    one.turn(8)
    one.cancel(*[p.id for p in prompts[::2]])
    verify: Any = one.group.by_name["verify"].stage
    drafter = verify.drafting.drafter
    tokens = one.finish(p.id for p in prompts)
    one.turn(2)
    again = answers(service(folder), [p for p in requests() if p.id in {q.id for q in prompts[1::2]}])
    assert {id: tokens[id] for id in again} == again
    if draft in ("itself", "another model"):
        assert drafter.num_free == drafter.num_blocks


# ----------------------------------------------------------------------------------------------------- distributions

FEW = dict.fromkeys(range(70, 75), 50.0)  # five tokens are all that comes
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"logit_bias": FEW},
    "logprobs and penalties": {"logit_bias": FEW, "logprobs": 1, **PENALTIES},
    "grammar": {"grammar": Grammar("regex", "[a-d]{4}"), "ignore_eos": False},
}
QUICK = [("suffix", "plain", 1.5), ("another model", "logprobs and penalties", 0.5), ("head", "grammar", 1.0)]
LONG = list(product(DRAFTS, KINDS, (0.5, 1.0, 1.5)))


def triples(one: Service, seeds: range, options: dict[str, Any]) -> np.ndarray:
    """How often the second, third and fourth tokens came together, by their ranks among those that can come."""
    text = random.Random(0).choices(range(70, 75), k=24)
    found = answers(one, [prompt(f"s{seed}", text, max_tokens=4, seed=seed, **options) for seed in seeds])
    low = min(min(tokens[:4]) for tokens in found.values())
    numbers = [(tokens[1] - low) * 25 + (tokens[2] - low) * 5 + tokens[3] - low for tokens in found.values()]
    return np.bincount(numbers, minlength=125)[:125]


def check_distribution(folder: Path, draft: str, options: dict[str, Any], count: int) -> None:
    """Chi-square over independent seeds, so that equality token for token can't make the test pass by itself."""
    drafting, seeds = service(folder, schedule="fixed", tokens=4, **DRAFTS[draft]), range(10_000, 10_000 + count)
    counts = np.stack([triples(service(folder), range(count), options), triples(drafting, seeds, options)])
    assert (counts.sum(1) == count).all()
    assert sum(end.drafted_tokens for end in drafting.client.ended.values()) > count / 50  # n-grams hold few
    usual = counts.sum(0) >= 10
    table = np.concatenate([counts[:, usual], counts[:, ~usual].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] > 2 and stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(("draft", "kind", "temperature"), QUICK)
def test_distributions_are_those_without_drafts(folder: Path, draft: str, kind: str, temperature: float) -> None:
    check_distribution(folder, draft, {**KINDS[kind], "temperature": temperature}, 200)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "kind", "temperature"), LONG)
def test_distributions_hold_over_many_seeds(folder: Path, draft: str, kind: str, temperature: float) -> None:
    check_distribution(folder, draft, {**KINDS[kind], "temperature": temperature}, 800)
