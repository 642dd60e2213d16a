"""Speculation in the whole decode loop: whatever drafts, however well and however many, the tokens are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_loop import Service, prompt, save_random_llama, save_random_v4
from drafters import KINDS, Cheat, cheat, save_random_head

from flowinfer.engine import hub
from flowinfer.engine.step import Features
from flowinfer.message import Prompt
from flowinfer.stages.spec_verify import stage
from flowinfer.stages.spec_verify.drafts import Ran
from flowinfer.stages.spec_verify.head import HeadDraft

VOCAB, CONTEXT = 96, 512


@pytest.fixture(scope="module", params=[save_random_llama, save_random_v4], ids=["llama", "deepseek_v4"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a random draft head in its folder."""
    folder: Path = tmp_path_factory.mktemp("model")
    request.param(folder, VOCAB, CONTEXT)
    save_random_head(folder, folder / "draft.safetensors")
    return folder


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def requests(count: int = 6, max_tokens: int = 60) -> list[Prompt]:
    return [
        prompt(f"r{n}", some_tokens(n, 1 + 47 * n % 150), max_tokens=max_tokens, **KINDS[n % len(KINDS)])
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    """The answers without speculation."""
    service = Service(model, num_blocks=64)
    service.send(*requests())
    return service.finish(p.id for p in requests())


def check_clean(service: Service) -> None:
    service.turn(2)
    assert service.pool.num_free == service.pool.num_blocks
    assert not service.decode.engine.held


def used(service: Service) -> tuple[int, int]:
    ends = [service.client.ended[p.id] for p in requests()]
    return sum(end.drafted_tokens for end in ends), sum(end.accepted_tokens for end in ends)


@pytest.mark.parametrize(
    ("draft", "schedule"),
    [
        ("head", "fixed"),
        ("head", "confidence"),
        ("suffix", "fixed"),
        ("ngram", "confidence"),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (
                ("head", "learned"),
                ("suffix", "learned"),
                ("suffix", "confidence"),
                ("ngram", "fixed"),
                ("ngram", "learned"),
            )
        ),
    ],
)
def test_no_source_and_no_schedule_changes_a_token(
    model: Path, plain: dict[str, list[int]], draft: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWINFER_CACHE", str(tmp_path))
    service = Service(model, num_blocks=64, verify={"draft": draft, "tokens": 5, "schedule": schedule})
    service.send(*requests())
    assert service.finish(p.id for p in requests()) == plain
    if schedule == "fixed":
        assert used(service)[0] > 0
    check_clean(service)


def test_the_target_as_its_own_drafter_is_always_right(model: Path, plain: dict[str, list[int]]) -> None:
    """Equal logits with equal settings and equal noise are equal tokens, whatever the temperature and the penalties."""
    settings = {"draft": "model", "draft_model": str(model), "tokens": 5, "schedule": "fixed"}
    service = Service(model, num_blocks=64, verify=settings)
    service.send(*requests())
    assert service.finish(p.id for p in requests()) == plain
    drafted, accepted = used(service)
    assert drafted > 200 and accepted > 0.98 * drafted
    check_clean(service)


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_good_drafts_in_any_number_change_no_token_and_save_steps(
    model: Path, plain: dict[str, list[int]], wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch, plain, wrong=wrong)
    service = Service(model, num_blocks=64, verify={"tokens": 8, "schedule": "fixed"})
    service.send(*requests())
    assert service.finish(p.id for p in requests()) == plain
    drafted, accepted = used(service)
    assert accepted > 0.95 * drafted if wrong == 0 else 0.1 * drafted < accepted < 0.9 * drafted
    assert service.decode.num_steps < (20 if wrong == 0 else 50)
    check_clean(service)


def test_preempted_sequences_draft_anew_and_give_the_same_tokens(
    model: Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch, plain, lengths="random")
    blocks = 12 // (hub.describe(model).layout().block_tokens // 64)
    service = Service(model, num_blocks=blocks)
    service.send(*requests())
    assert service.finish(p.id for p in requests()) == plain
    assert service.decode.num_preemptions > 0
    check_clean(service)


def test_the_heads_features_survive_preemption_and_random_joins(model: Path, plain: dict[str, list[int]]) -> None:
    blocks = 12 // (hub.describe(model).layout().block_tokens // 64)
    service = Service(model, num_blocks=blocks, verify={"draft": "head", "tokens": 5, "schedule": "fixed"})
    for one in requests():
        service.send(one)
        service.turn(3)
    assert service.finish(p.id for p in requests()) == plain
    assert service.decode.num_preemptions > 0
    check_clean(service)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_random_cancels_leave_every_block_free_and_every_answer_right(
    model: Path, plain: dict[str, list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed:
        cheat(monkeypatch, plain, lengths="random", block=rng.randrange(1, 9))
    service = Service(model, num_blocks=64, verify={"draft": "head", "tokens": 5, "schedule": "fixed"})
    victims = rng.sample([p.id for p in requests()], 2)
    for one in requests():
        service.send(one)
        service.turn(rng.randrange(0, 6))
        if one.id in victims:
            service.cancel(one.id)
    tokens = service.finish(p.id for p in requests())
    survivors = [p.id for p in requests() if p.id not in victims]
    assert {id: tokens[id] for id in survivors} == {id: plain[id] for id in survivors}
    check_clean(service)


def test_live_changes_of_the_drafter_change_no_token(
    model: Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "is_quick", lambda config: True)
    service = Service(model, num_blocks=64, draft="none")
    verify: Any = service.group.by_name["verify"].stage
    service.send(*requests())
    for settings in (
        {"draft": "head", "tokens": 5},
        {"draft": "ngram", "tokens": 8, "schedule": "fixed"},
        {"draft": "head", "tokens": 2, "schedule": "confidence"},
        {"draft": "none"},
        {"draft": "suffix"},
    ):
        service.turn(8)
        verify.reconfigure(verify.Config(**settings))
    assert service.finish(p.id for p in requests()) == plain
    check_clean(service)


def test_a_head_is_loaded_while_the_service_goes_on(model: Path, plain: dict[str, list[int]]) -> None:
    service = Service(model, num_blocks=64, draft="none")
    verify: Any = service.group.by_name["verify"].stage
    verify.reconfigure(verify.Config(draft="head"))
    while verify._next is None:
        service.woken.wait(1)
        service.turn()
    service.send(*requests())
    assert service.finish(p.id for p in requests()) == plain
    assert isinstance(verify.drafting.drafter, HeadDraft)


def test_a_head_that_cannot_be_loaded_leaves_the_drafter_as_it_was(
    model: Path, plain: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(model, num_blocks=64)
    verify: Any = service.group.by_name["verify"].stage
    verify.reconfigure(verify.Config(draft="head", head="nowhere.safetensors"))
    service.send(*requests())
    while not caplog.records:
        service.woken.wait(1)
        service.turn()
    assert "nowhere.safetensors" in caplog.text
    assert service.finish(p.id for p in requests()) == plain


def test_those_that_wait_never_hold_each_other_up(model: Path) -> None:
    """As many blocks as the prompts take, and the first of them needs one more."""
    block = hub.describe(model).layout().block_tokens
    prompts = [prompt("first", [5], max_tokens=20), *(prompt(f"r{n}", some_tokens(n, block)) for n in range(3))]
    service = Service(model, num_blocks=3)
    service.send(*prompts)
    assert all(len(tokens) for tokens in service.finish(p.id for p in prompts).values())
    check_clean(service)


def test_the_cheat_is_told_of_every_row_that_holds(
    model: Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch, plain, wrong=0.3)
    service = Service(model, num_blocks=64, verify={"tokens": 8, "schedule": "fixed"})
    service.send(*requests())
    service.finish(p.id for p in requests())
    verify: Any = service.group.by_name["verify"].stage
    drafter: Cheat = verify.drafting.drafter
    total = sum(len(tokens) for tokens in plain.values())
    assert total - 8 * len(plain) <= drafter.num_rows < total  # but for the last step of each, which ends it


def mini_requests(count: int, max_tokens: int) -> list[Prompt]:
    """Prompts that end shortly before a group of 4 or 128 or a block does."""
    lengths = (126, 253, 118, 7, 384, 131)
    rng = random.Random(5)
    return [
        prompt(
            f"m{n}",
            rng.choices(range(300, 8000), k=lengths[n]),
            max_tokens=max_tokens,
            temperature=(0.0, 0.8)[n % 2],
            seed=n,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "max_tokens"), [(2, 10), pytest.param(6, 150, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_flowinfer_mini_gives_the_same_tokens_with_drafts_of_any_length(
    count: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = mini_requests(count, max_tokens)
    alone = Service("flowinfer-mini", num_blocks=24)
    alone.send(*prompts)
    answers = alone.finish(p.id for p in prompts)
    cheat(monkeypatch, answers, lengths="random", wrong=0.15)
    service = Service("flowinfer-mini", num_blocks=24)
    service.send(*prompts)
    assert service.finish(p.id for p in prompts) == answers
    assert sum(service.client.ended[p.id].accepted_tokens for p in prompts) > 0
    assert service.decode.num_steps < alone.decode.num_steps
    check_clean(service)


class Reader(Cheat):
    """A cheat that reads the last layer, and keeps what it's told."""

    needs_features: tuple[int, ...] = (1, 0)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: dict[int, list[Ran]] = {}

    def join(self, slot: int) -> None:
        self.told[slot] = []

    def observe(self, ran: Ran) -> None:
        super().observe(ran)
        for slot in dict.fromkeys(ran.slots.tolist()):
            own = ran.slots == slot
            features = None if ran.features is None else ran.features[torch.from_numpy(own)]
            self.told[slot].append(Ran(ran.slots[own], ran.positions[own], ran.tokens[own], features))


def test_a_drafter_reads_each_token_that_decode_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the prompt's last one on, and anew after a preemption; each row is of the token that it says."""
    one = prompt("r0", some_tokens(1, 215), max_tokens=30)
    service = Service(model, num_blocks=64)
    service.send(one)
    answer = service.finish(["r0"])["r0"]
    monkeypatch.setattr(stage, "make_drafter", lambda config, batch: Reader(batch, {"r0": answer}, wrong=0.2))
    service = Service(model, num_blocks=64, verify={"schedule": "fixed"})
    service.send(one)
    while not service.client.tokens.get("r0"):
        service.turn()
    decode: Any = service.decode
    verify: Any = service.group.by_name["verify"].stage
    assert check_told(decode, verify.drafting.drafter) == 214
    decode._preempt(0)
    service.turn(6)
    assert check_told(decode, verify.drafting.drafter) > 214
    assert service.finish(["r0"])["r0"] == answer


def check_told(decode: Any, drafter: Reader) -> int:
    """Compares all that was said of the only sequence with one pass over its history; returns the first position."""
    (slot,) = decode.batch.slot_of.values()
    told, history = drafter.told[slot], decode.batch.history(slot)
    positions = np.concatenate([ran.positions for ran in told])
    assert positions.tolist() == list(range(int(positions[0]), len(history) - 1))
    engine, wanted = decode.engine, Features(drafter.needs_features)
    blocks = engine.pool.allocate(engine.layout.blocks_for(len(history)))
    counts = np.array([len(history)], np.int32)
    engine.forward(history, counts, counts, np.array([blocks], np.int32), features=wanted)
    engine.pool.release(blocks)
    given = torch.cat([ran.features for ran in told if ran.features is not None])
    torch.testing.assert_close(given, wanted.joined()[positions], rtol=1e-3, atol=1e-3)
    return int(positions[0])
