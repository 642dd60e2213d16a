"""The sampler of the engine: settings by slot, penalties at draft positions, log-probabilities, rejection sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flowinfer.engine.sampling import Sampler, reject, seed_of, token_logprob
from flowinfer.engine.sampling.history import History
from flowinfer.message import Ids, Sampling

torch.set_num_threads(1)
VOCAB = 20


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def chosen_by(sampler: Sampler, logits: torch.Tensor, slot: int, position: int, *drafts: int) -> list[int]:
    starts = ids(0, len(drafts) + 1)
    return sampler.choose(logits, ids(slot), starts, ids(position), ids(*drafts)[None]).tolist()


def make(**settings_: Any) -> tuple[Sampler, Sampling]:
    sampler = Sampler(max_slots=4, vocab_size=VOCAB, eos_token_ids=(0,))
    return sampler, Sampling(**{"temperature": 0.0} | settings_)


def expected_logits(row: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Bias and penalties, token by token, straight from their definitions."""
    row = row.clone()
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / sampling.repetition_penalty if row[token] > 0 else row[token] * sampling.repetition_penalty
        )
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return row


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.9},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4, "logit_bias": {3: 1.0, 5: -2.0}},
]


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalties_count_prompt_output_and_earlier_drafts(penalties: dict[str, Any]) -> None:
    sampler, sampling = make(**penalties)
    prompt, output, drafts = [1, 2, 2, 3], [4, 5, 5], [6, 5, 1, 6]
    sampler.join(2, sampling, "a", ids(*prompt, *output[:1]), len(prompt))
    sampler.advance(2, ids(*output[1:]))
    for seed in range(30):
        logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
        rows = [expected_logits(logits[j], sampling, prompt, output + drafts[:j]) for j in range(5)]
        assert chosen_by(sampler, logits, 2, 7, *drafts) == [int(row.argmax()) for row in rows]


RUN = st.lists(st.integers(0, 9), max_size=8)


@settings(max_examples=50, deadline=None)
@given(st.lists(RUN, min_size=1, max_size=8), RUN)
def test_drafts_leave_no_trace_in_the_history(runs: list[list[int]], drafts: list[int]) -> None:
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.5)
    walked = History(sampling, ids(1, 2), 2, VOCAB)
    output: list[int] = []
    for run in runs:
        walked.with_drafts(ids(*drafts))
        walked.extend(ids(*run))
        output += run
    rebuilt = History(sampling, ids(1, 2, *output), 2, VOCAB)
    (seen, subtract), (seen_again, subtract_again) = walked.with_drafts(ids())[0], rebuilt.with_drafts(ids())[0]
    assert dict(zip(seen.tolist(), subtract.tolist(), strict=True)) == dict(
        zip(seen_again.tolist(), subtract_again.tolist(), strict=True)
    )


def test_min_tokens_bars_ends_row_by_row() -> None:
    sampler, sampling = make(min_tokens=3, stop_token_ids=(7,))
    sampler.join(0, sampling, "a", ids(1, 2), 2)
    logits = torch.zeros(4, VOCAB)
    logits[:, 0], logits[:, 7], logits[:, 9] = 5.0, 4.0, 3.0
    # one token of output so far: the rows give output 1, 2, 3 and 4, counted from 0
    assert chosen_by(sampler, logits, 0, 3, 9, 9, 9) == [9, 9, 0, 0]


def test_ignored_ends_are_not_barred() -> None:
    sampler, sampling = make(min_tokens=3, stop_token_ids=(7,), ignore_eos=True)
    sampler.join(0, sampling, "a", ids(1, 2), 2)
    logits = torch.zeros(1, VOCAB)
    logits[:, 0], logits[:, 7] = 4.0, 5.0
    assert chosen_by(sampler, logits, 0, 2) == [0]


def test_a_mixed_batch_gives_each_row_its_own_settings() -> None:
    sampler, greedy = make()
    sampler.join(0, greedy, "a", ids(1), 1)
    sampler.join(1, Sampling(temperature=1.0, seed=3), "b", ids(1), 1)
    sampler.join(3, Sampling(temperature=0.0, logit_bias={11: 100.0}), "c", ids(1), 1)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    drafts = ids(4, 4, 4, 4, 4, 4).reshape(3, 2)
    together = sampler.choose(logits, ids(3, 1, 0), ids(0, 2, 5, 6), ids(1, 1, 1), drafts)
    assert together[:2].tolist() == [11, 11] and together[5] == logits[5].argmax()
    assert together[2:5].tolist() == chosen_by(sampler, logits[2:5], 1, 1, 4, 4)


def test_leaving_makes_a_slot_plain_again() -> None:
    sampler, _ = make()
    sampler.join(1, Sampling(temperature=1.0, frequency_penalty=1.0), "b", ids(1), 1)
    assert not sampler.plain[1] and sampler.tracked == {1}
    sampler.leave(1)
    assert sampler.plain.all() and not sampler.tracked


def test_seeds_are_stable_and_cover_negative_numbers() -> None:
    assert seed_of(Sampling(seed=-1), "a") == 2**64 - 1
    assert seed_of(Sampling(), "a") == seed_of(Sampling(), "a") != seed_of(Sampling(), "b")


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB])
def test_logprobs_agree_with_log_softmax(num_top: int) -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 5
    row[3] = -torch.inf
    found, expected = token_logprob(row, 6, num_top), row.double().log_softmax(0)
    assert found.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    best = expected.topk(num_top)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-6)


# -------------------------------------------------------------------------------------------------- rejection sampling

K, V, DRAWS = 2, 6, 20_000


def run_rejection(p: torch.Tensor, q: torch.Tensor, seed: int, num_drafts: int = K) -> np.ndarray[Any, Any]:
    """Counts of (first, second) output token over DRAWS runs; a run too short is continued from p."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.stack([torch.multinomial(q[j], DRAWS, replacement=True, generator=generator) for j in range(K)], 1)
    uniforms = torch.rand(DRAWS, K + 1, generator=generator, dtype=torch.float64)
    lengths = torch.full((DRAWS,), num_drafts)
    accepted, following = reject(p.expand(DRAWS, -1, -1), q.expand(DRAWS, -1, -1), drafts, uniforms, lengths)
    assert (accepted <= num_drafts).all()
    spare = torch.multinomial(p[1], DRAWS, replacement=True, generator=generator)
    first = torch.where(accepted >= 1, drafts[:, 0], following)
    second = torch.where(accepted >= 2, drafts[:, 1], torch.where(accepted == 1, following, spare))
    return np.bincount((first * V + second).numpy(), minlength=V * V)


def distribution(seed: int, rows: int, temperature: float) -> torch.Tensor:
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits * 2 / temperature).softmax(1)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_rejection_keeps_the_distribution(temperature: float, filtered: bool, num_drafts: int) -> None:
    p, q = distribution(1, K + 1, temperature), distribution(2, K, 1.0)
    if filtered:  # the target's filters drop what the drafter still proposes
        p = p.masked_fill(p < p.topk(3, dim=1).values[:, -1:], 0)
        p = p / p.sum(1, keepdim=True)
    expected = (p[0].unsqueeze(1) * p[1]).flatten().numpy() * DRAWS
    observed = run_rejection(p, q, seed=11, num_drafts=num_drafts)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    observed, expected = (np.append(c[common], c[~common].sum()) for c in (observed, expected))
    present = expected > 0
    assert stats.chisquare(observed[present], expected[present]).pvalue > 1e-3


def test_equal_distributions_accept_everything() -> None:
    p = distribution(4, K + 1, 1.0)
    drafts = torch.randint(0, V, (500, K), generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(500, K + 1, generator=torch.Generator().manual_seed(1))
    accepted, _ = reject(p.expand(500, -1, -1), p[:K].expand(500, -1, -1), drafts, uniforms)
    assert (accepted == K).all()


def test_rejection_of_a_point_mass_is_equality_with_the_targets_sample_in_distribution() -> None:
    """The rule for n-gram drafts, accept iff the target's own sample is the draft, is `reject` with q a point mass."""
    p, draft = distribution(5, 2, 1.0), 2
    q = torch.nn.functional.one_hot(torch.tensor([draft]), V).double()
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.rand(DRAWS, 2, generator=generator, dtype=torch.float64)
    drafts = torch.full((DRAWS, 1), draft)
    accepted, following = reject(p.expand(DRAWS, -1, -1), q.expand(DRAWS, -1, -1), drafts, uniforms)
    assert stats.binomtest(int(accepted.sum()), DRAWS, float(p[0, draft])).pvalue > 1e-3
    others = following[accepted == 0]
    assert (others != draft).all()
    rest = p[0].clone()
    rest[draft] = 0
    expected = (rest / rest.sum()).numpy() * others.numel()
    keep = np.arange(V) != draft
    assert stats.chisquare(np.bincount(others.numpy(), minlength=V)[keep], expected[keep]).pvalue > 1e-3


def test_no_drafts_draw_from_the_target() -> None:
    p = distribution(6, 1, 1.0)
    uniforms = torch.tensor([[0.0], [0.999999]], dtype=torch.float64)
    accepted, following = reject(p.expand(2, -1, -1), torch.empty(2, 0, V), torch.empty(2, 0).long(), uniforms)
    assert accepted.tolist() == [0, 0] and following.tolist() == [0, V - 1]
