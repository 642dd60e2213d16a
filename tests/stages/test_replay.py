"""Prefixes without their window keys: what a prompt behind one answers, and that nothing cached is ever written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_loop import prompt
from windowed import FIRST, SHAPES, Watched, behind, block_tokens, cold, counted, first_tokens, same, some_tokens

from flowinfer.engine import hub

Models = Callable[[str], Path]
Stored = Callable[..., Path]


def slow(*values: object) -> Any:
    """A case that runs on demand."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


@pytest.mark.parametrize(
    ("shape", "at", "mode"),
    [
        ("all kinds", 5, "exact"),
        ("two blocks", 6, "exact"),
        ("small", 3, "exact"),
        ("two blocks", 6, "off"),
        *(slow(shape, at, mode) for shape in SHAPES for at in (1, 4, 8) for mode in ("exact", "off")),
    ],
)
def test_behind_a_hit_at_any_block_the_answer_is_that_of_a_cold_run(
    models: Models, stored: Stored, shape: str, at: int, mode: str
) -> None:
    model = models(shape)
    running, before = Watched(model, stored(shape), mode), counted("prefix_replay_tokens_total")
    same(running.ask(behind(model, at)), cold(model, behind(model, at)))
    size, blocks = block_tokens(model), running.engine.prefixes.rule.blocks
    replays = mode == "exact" and at > blocks
    assert running.end.cached_tokens == ((at - blocks) * size if replays else 0)
    assert counted("prefix_replay_tokens_total") - before == (blocks * size if replays else 0)
    running.stop()


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ("all kinds", "exact"),
        ("two blocks", "bounded"),
        ("two blocks", "off"),
        *(slow("small", mode) for mode in ("exact", "bounded", "off")),
    ],
)
def test_at_the_end_of_a_prompt_its_state_was_kept_and_nothing_is_run_again(
    models: Models, stored: Stored, shape: str, mode: str
) -> None:
    model, before = models(shape), counted("prefix_replay_tokens_total")
    running = Watched(model, stored(shape, mode), mode)
    same(running.ask(behind(model, FIRST)), cold(model, behind(model, FIRST)))
    assert running.end.cached_tokens == FIRST * block_tokens(model)
    assert counted("prefix_replay_tokens_total") == before
    running.stop()


def test_bounded_is_near_and_runs_one_window(models: Models, stored: Stored) -> None:
    model = models("all kinds")
    running, before = Watched(model, stored("all kinds", "bounded"), "bounded"), counted("prefix_replay_tokens_total")
    _, found = running.ask(behind(model, 6))
    _, wanted = cold(model, behind(model, 6))
    assert running.end.cached_tokens == 5 * 128
    assert counted("prefix_replay_tokens_total") - before == 128
    far = (found[0] - wanted[0]).norm() / wanted[0].norm()
    assert 1e-6 < far < 0.5, "near, but not the same"
    running.stop()


def test_a_replay_reads_no_window_before_its_beginning(models: Models, stored: Stored) -> None:
    """What the memory of partial blocks holds from earlier tenants doesn't show."""
    model, answers = models("all kinds"), []
    for seed in (1, 2):
        running = Watched(model, stored("all kinds", "bounded"), "bounded", seed=seed)
        answers.append(running.ask(behind(model, 6))[1])
        running.stop()
    assert torch.equal(*answers)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_prompts_at_once_behind_one_prefix_share_its_blocks_and_write_none_of_them(
    models: Models, stored: Stored, mode: str
) -> None:
    """Some find partial blocks in the pool, some read further ones, some go on where others have replayed."""
    model = models("two blocks")
    running = Watched(model, stored("two blocks", mode), mode, num_blocks=120)
    running.ask(behind(model, 8))
    prompts = {f"r{n}": behind(model, at, seed=n) for n, at in enumerate((7, 7, 6, 8, 9))}
    running.send(*[prompt(id, tokens, max_tokens=9) for id, tokens in prompts.items()])
    answers = running.finish(prompts)
    if mode == "exact":
        assert answers == {id: cold(model, tokens, 9)[0] for id, tokens in prompts.items()}
    running.stop()


def test_a_window_made_by_a_bounded_replay_counts_for_nobody(models: Models, stored: Stored) -> None:
    """Not in the pool: the next prompt replays too.  Not on disk: a service that wants it exact finds none of it."""
    model, folder = models("two blocks"), stored("two blocks", "bounded")
    running = Watched(model, folder, "bounded")
    first = running.ask(behind(model, 6))
    before = counted("prefix_replay_tokens_total")
    again = running.ask(behind(model, 6, seed=3))
    assert counted("prefix_replay_tokens_total") - before == 2 * 64
    assert running.pool.is_partial(running.pool.names()[5])
    running.stop()
    exact = Watched(model, folder)
    same(exact.ask(behind(model, 6)), cold(model, behind(model, 6)))
    assert exact.end.cached_tokens == 0
    exact.stop()
    assert first and again


def test_an_exact_replay_leaves_a_whole_block_behind(models: Models, stored: Stored) -> None:
    model = models("all kinds")
    running = Watched(model, stored("all kinds"))
    running.ask(behind(model, 6))
    before = counted("prefix_replay_tokens_total")
    same(running.ask(behind(model, 6, seed=3)), cold(model, behind(model, 6, seed=3)))
    assert running.end.cached_tokens == 6 * 128 and counted("prefix_replay_tokens_total") == before
    running.stop()


def test_prompts_whose_logprobs_are_asked_for_never_replay(models: Models, stored: Stored) -> None:
    model, before = models("two blocks"), counted("prefix_replay_tokens_total")
    running = Watched(model, stored("two blocks"))
    running.ask(behind(model, 7), prompt_logprobs=1)
    assert running.end.cached_tokens == 0 and counted("prefix_replay_tokens_total") == before
    running.stop()


@pytest.mark.parametrize("turns", [5, *map(slow, (1, 3, 9))])
def test_a_cancel_in_the_middle_of_a_replay_frees_all_and_spoils_nothing(
    models: Models, stored: Stored, turns: int
) -> None:
    model = models("all kinds")
    running = Watched(model, stored("all kinds"))
    running.send(prompt("gone", behind(model, 6)))
    prefill: Any = running.group.by_name["prefill"].stage
    while "gone" not in running.engine.held or prefill.restoring:
        running.turn()
    running.turn(turns)
    running.cancel("gone")
    running.settle()
    same(running.ask(behind(model, 6)), cold(model, behind(model, 6)))
    running.stop()


def test_preempted_behind_a_replay_changes_no_token(models: Models, stored: Stored) -> None:
    model = models("two blocks")
    prompts = {f"r{n}": behind(model, 7, seed=n) for n in range(3)}
    running = Watched(model, stored("two blocks"), num_blocks=14)
    running.send(*[prompt(id, tokens, max_tokens=90) for id, tokens in prompts.items()])
    answers = running.finish(prompts)
    assert running.decode.num_preemptions > 0
    assert answers == {id: cold(model, tokens, 90)[0] for id, tokens in prompts.items()}
    running.stop()


@pytest.mark.parametrize("budget", [37, *map(slow, (16, 145))])
def test_a_replay_may_be_cut_anywhere(models: Models, stored: Stored, budget: int) -> None:
    model = models("all kinds")
    running = Watched(model, stored("all kinds"))
    scheduler = running.group.by_name["prefill"].stage.scheduler  # type: ignore[attr-defined]
    scheduler.token_budget, scheduler.block_tokens = budget, 1
    same(running.ask(behind(model, 5)), cold(model, behind(model, 5)))
    assert running.end.cached_tokens == 2 * 128
    running.stop()


def test_a_chat_that_grows_over_restarts_goes_on_where_it_ended(models: Models, tmp_path: Path) -> None:
    """Each turn finds the end of the one before, of its output too: nothing is run again."""
    model, before = models("two blocks"), counted("prefix_replay_tokens_total")
    tokens, num_kept = some_tokens(5, 150), 0
    for turn in range(3):
        running = Watched(model, tmp_path)
        answer, logits = running.ask(tokens, 70)
        assert running.end.cached_tokens == num_kept
        num_kept = (len(tokens) + len(answer) - 1) // 64 * 64
        asked, tokens = tokens, [*tokens, *answer, *some_tokens(turn, 9)]
        running.stop()
    same((answer, logits), cold(model, asked, 70))
    assert counted("prefix_replay_tokens_total") == before


@pytest.mark.parametrize(("at", "budget"), [(5, 96), slow(8, 128), slow(6, 40)])
def test_where_bytes_depend_on_nothing_else_exact_is_a_cold_run_bit_for_bit(
    models: Models, tmp_path: Path, at: int, budget: int
) -> None:
    """With batch_invariant: logits, and what is cached afterwards of every whole block."""
    model, folder = models("all kinds"), tmp_path / "kv"
    first = Watched(model, folder, invariant=True)
    first.ask(first_tokens(model), 2)
    first.stop()
    running, alone = Watched(model, folder, invariant=True), Watched(model, None, invariant=True)
    running.group.by_name["prefill"].stage.scheduler.token_budget = budget  # type: ignore[attr-defined]
    found, wanted = running.ask(behind(model, at)), alone.ask(behind(model, at))
    assert running.end.cached_tokens == (at - 3) * 128
    assert torch.equal(found[1], wanted[1])
    for name in set(running.pool.names()) - {n for n in running.pool.names() if running.pool.is_partial(n)}:
        end = running.engine.layout.parts["state"].stop
        ours, theirs = (one.engine.kv[one.pool._named[name]][:end] for one in (running, alone))
        assert torch.equal(ours, theirs)
    running.stop()


@pytest.mark.slow
def test_flowinfer_mini_too_answers_as_a_cold_run(tmp_path: Path) -> None:
    """Eight layers of 128 tokens are replayed of a hit of eleven blocks; bounded comes near."""
    model = hub.resolve("flowinfer-mini")
    first = some_tokens(1, 12 * 128 + 9, 8192)
    tokens = [*first[: 11 * 128 + 5], *some_tokens(2, 30, 8192)]
    wanted = cold(model, tokens)
    for mode, replayed in (("exact", 8), ("bounded", 1)):
        filled = Watched(model, tmp_path / mode, mode)
        filled.ask(first, 1)
        filled.stop()
        running = Watched(model, tmp_path / mode, mode)
        found = running.ask(tokens)
        assert running.end.cached_tokens == (11 - replayed) * 128
        if mode == "exact":
            same(found, wanted)
        assert (found[1][0] - wanted[1][0]).norm() / wanted[1][0].norm() < 0.3
        running.stop()
