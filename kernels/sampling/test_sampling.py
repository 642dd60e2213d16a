"""The sampling op: the CPU path against the torch reference, the hash against what random numbers must satisfy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.sampling import RowEdits, RowParams, _sample_torch, argmax, reference, sample
from flowinfer.kernels.sampling.host import RowSampler, top_tokens
from flowinfer.kernels.sampling.noise import exponentials, lane_bits, spread_tokens, stream_keys

torch.set_num_threads(1)


def params(rows: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int = 0) -> RowParams:
    return RowParams(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int64),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
        stream_keys(np.full(rows, seed, np.uint64), np.arange(rows)),
    )


def normal_logits(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ----------------------------------------------------------------------------------------------- host against reference

FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.0, 0.0), (0, 1.0, 0.05), (20, 0.7, 0.01)]


@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.7, 1.0, 30.0])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (37, 0.0), (1000, 1.0), (4099, 6.0)])
def test_host_equals_reference(temperature: float, filters: tuple[int, float, float], vocab: int, scale: float) -> None:
    logits = normal_logits(40, vocab, scale)
    settings_ = params(40, temperature, *filters)
    rows, edits = list(range(40)), [None] * 40
    assert sample(logits, rows, settings_, edits).tolist() == _sample_torch(logits, rows, settings_, edits).tolist()


def test_host_equals_reference_with_edits() -> None:
    logits, rows = normal_logits(30, 500, 3.0), list(range(30))
    generator = np.random.default_rng(0)
    edits: list[RowEdits | None] = [
        RowEdits(
            bias_tokens=generator.choice(500, 5, replace=False),
            bias=np.array([4.0, -np.inf, 1.0, -2.0, 0.0], np.float32),
            seen=generator.choice(500, 60, replace=False),
            subtract=generator.random(60).astype(np.float32) * row % 3,
            repetition=1.0 + row % 2,
        )
        for row in rows
    ]
    edits[3], edits[7] = None, RowEdits()
    before = logits.clone()
    for temperature in (0.0, 1.0):
        settings_ = params(30, temperature, 0, 1.0, 0.0)
        assert (sample(logits, rows, settings_, edits) == _sample_torch(logits, rows, settings_, edits)).all()
    assert torch.equal(logits, before), "logits belong to the caller"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]), min_size=1, max_size=40),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_host_equals_reference_on_ties(values: list[float], k: int, p: float, min_p: float, seed: int) -> None:
    logits = torch.tensor([values])
    settings_ = params(1, 0.9, k if k < len(values) else 0, p, min_p, seed)
    assert sample(logits, [0], settings_, [None]) == _sample_torch(logits, [0], settings_, [None])


def test_filters_apply_in_order_each_over_what_the_one_before_left() -> None:
    # 0.4 0.3 0.2 0.06 0.04: min-p 0.2 leaves three, top-k 2 leaves 4/7 and 3/7, top-p 0.55 leaves one
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()

    def kept(top_k: int, top_p: float, min_p: float) -> int:
        one = torch.ones(1)
        filtered = reference.filtered(logits, one, torch.tensor([top_k]), one * top_p, one * min_p)
        return int(filtered.isfinite().sum())

    assert [kept(0, 1.0, 0.2), kept(2, 1.0, 0.2), kept(2, 0.55, 0.2), kept(0, 0.55, 0.0)] == [3, 2, 1, 2]


@pytest.mark.parametrize("count", [1, 3, 50, 200])
def test_top_tokens_are_the_best(count: int) -> None:
    for scale in (0.0, 0.1, 1.0, 20.0):
        row = normal_logits(1, 200, scale)[0].numpy()
        found = top_tokens(row, count)
        least = np.sort(row)[-count]
        assert found.tolist() == np.flatnonzero(row >= least).tolist()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_give_minus_one(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 9)
    logits[1, :] = bad
    assert sample(logits, [0, 1], params(2, temperature, 0, 1.0, 0.0), [None, None])[1] == -1
    assert argmax(logits).tolist() == [0, -1]


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 33, 200])
@pytest.mark.parametrize("spare", [0, 1, 4])
def test_only_what_the_bits_allow_is_chosen(vocab: int, spare: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = normal_logits(3, vocab, 2.0, seed=5)
    for share in (0.1, 0.9):
        flags = rng.random(vocab) < share
        flags[rng.integers(vocab)] = True
        bits = np.concatenate([np.packbits(flags, bitorder="little"), np.full(spare, 255, np.uint8)])
        edits = [RowEdits(allowed=bits)] * 3
        greedy = sample(logits, [0, 1, 2], params(3, 0.0, 0, 1.0, 0.0), edits)
        masked = np.where(flags, logits.numpy(), -np.inf)
        assert greedy.tolist() == masked.argmax(1).tolist()
        assert flags[sample(logits, [0, 1, 2], params(3, 1.0, 0, 1.0, 0.0), edits)].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_counts_only_where_it_is_allowed(temperature: float) -> None:
    logits = torch.zeros(2, 16)
    logits[:, 3] = torch.nan
    allowed = [np.packbits(np.arange(16) != 3, bitorder="little"), np.full(2, 255, np.uint8)]
    found = sample(logits, [0, 1], params(2, temperature, 0, 1.0, 0.0), [RowEdits(allowed=bits) for bits in allowed])
    assert found[0] >= 0 and found[1] == -1


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(KernelUnsupported, match="bfloat16"):
        sample(torch.zeros(1, 4, dtype=torch.bfloat16), [0], params(1, 1.0, 0, 1.0, 0.0), [None])


# ------------------------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (9, 0.9, 0.02)])
def test_samples_have_the_distribution_of_the_filtered_softmax(
    temperature: float, filters: tuple[int, float, float]
) -> None:
    draws, logits = 8000, normal_logits(1, 24, 1.5, seed=3)
    settings_ = params(draws, temperature, *filters, seed=17)
    chosen = sample(logits, [0] * draws, settings_, [None] * draws)
    one = torch.ones(1)
    kept = reference.filtered(logits, one * temperature, torch.tensor([filters[0]]), one * filters[1], one * filters[2])
    expected = kept[0].double().softmax(0).numpy() * draws
    counts = np.bincount(chosen, minlength=24)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    observed = np.append(counts[expected >= 5], counts[rare].sum())
    wanted = np.append(expected[expected >= 5], expected[rare].sum())
    present = wanted > 0
    if present.sum() > 1:
        assert stats.chisquare(observed[present], wanted[present]).pvalue > 1e-3


def test_a_large_vocabulary_is_sampled_right_in_its_tail() -> None:
    """Half of the mass in one token, half over 20,000: the pruned race must find the tail as often as it weighs."""
    logits = torch.zeros(1, 20_001)
    logits[0, 777] = float(np.log(20_000))
    chosen = sample(logits, [0] * 2000, params(2000, 1.0, 0, 1.0, 0.0, seed=5), [None] * 2000)
    tail = chosen[chosen != 777]
    assert stats.binomtest(tail.size, 2000, 0.5).pvalue > 1e-3
    assert stats.kstest(tail / 20_001, "uniform").pvalue > 1e-3


# --------------------------------------------------------------------------------------------------------------- hash


def keys_of(seeds: range, positions: range) -> list[int]:
    grid = [(seed, position) for seed in seeds for position in positions]
    seed, position = (np.array(column) for column in zip(*grid, strict=True))
    keys: list[int] = stream_keys(seed.astype(np.uint64), position.astype(np.int64)).tolist()
    return keys


def test_reference_noise_is_that_of_the_host() -> None:
    keys = stream_keys(np.array([0, 2**64 - 1, 12345], np.uint64), np.array([0, 7, 2**40]))
    noise = reference.exponentials(torch.from_numpy(keys.view(np.int64)), 3000).numpy()
    for row, key in zip(noise, keys.tolist(), strict=True):
        np.testing.assert_allclose(row, exponentials(key, np.arange(3000)), rtol=1e-14)


def test_noise_is_exponential_and_uncorrelated() -> None:
    """Over tokens of one key, and over neighbouring positions and seeds at one token."""
    tokens = np.arange(4000)
    noise = np.array([exponentials(key, tokens) for key in keys_of(range(8), range(8))])
    for sample_ in (noise[0], noise[:, 0], noise[:, 3999], noise.ravel()):
        assert stats.kstest(sample_, "expon").pvalue > 1e-4
    correlation = np.corrcoef(np.exp(-noise))[np.triu_indices(64, 1)]
    assert np.abs(correlation).max() < 5.5 / np.sqrt(4000)
    assert abs(np.mean(correlation)) < 0.005
    shifted = [np.corrcoef(np.exp(-row[:-lag]), np.exp(-row[lag:]))[0, 1] for row in noise[:8] for lag in (1, 2, 64)]
    assert np.abs(shifted).max() < 5 / np.sqrt(4000)


def flip_shares(flipped: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([((flipped >> np.uint32(bit)) & np.uint32(1)).mean() for bit in range(32)])


@pytest.mark.parametrize("lane", [0, 1])
def test_every_bit_of_a_token_flips_half_of_the_output_bits(lane: int) -> None:
    base = lane_bits(0x0123456789ABCDEF, spread_tokens(1 << 16), lane).copy()
    for bit in range(16):
        shares = flip_shares(base ^ base[np.arange(1 << 16) ^ (1 << bit)])
        assert np.abs(shares - 0.5).max() < 0.05, bit


@pytest.mark.parametrize("lane", [0, 1])
def test_every_bit_of_seed_and_position_flips_half_of_the_output_bits(lane: int) -> None:
    spread = spread_tokens(64)
    seeds, positions = np.arange(64, dtype=np.uint64), np.arange(64)

    def bits(seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        keys = stream_keys(seeds, positions).tolist()
        return np.array([lane_bits(key, spread, lane) for key in keys])

    base = bits(seeds, positions)
    for bit in range(64):
        assert np.abs(flip_shares(base ^ bits(seeds ^ np.uint64(1 << bit), positions)) - 0.5).max() < 0.05, bit
    for bit in range(20):
        assert np.abs(flip_shares(base ^ bits(seeds, positions ^ (1 << bit))) - 0.5).max() < 0.05, bit


def test_keys_of_neighbours_do_not_collide() -> None:
    keys = keys_of(range(300), range(300))
    assert len(set(keys)) == 90_000
    assert len({key & 0xFFFFFFFF for key in keys}) > 89_990 - 2 * 90_000**2 / 2**33


def test_the_row_sampler_gives_what_it_gave_before() -> None:
    """Fixed values: a change of the hash would change every seeded answer of a service."""
    sampler = RowSampler(1000)
    keys = stream_keys(np.full(6, 42, np.uint64), np.arange(6)).tolist()
    flat = np.zeros(1000, np.float32)
    assert [sampler.sample(flat, 1.0, 0, 1.0, 0.0, key) for key in keys] == PINNED


PINNED = [449, 987, 740, 22, 223, 581]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_chooses_what_the_cpu_does() -> None:
    logits, rows = normal_logits(64, 8192, 4.0), list(range(64))
    edits = [RowEdits(seen=np.arange(row, 200 + row), subtract=np.ones(200, np.float32)) for row in rows]
    for temperature, filters in [(0.0, FILTERS[0]), (1.0, FILTERS[0]), (0.8, FILTERS[3]), (0.8, FILTERS[6])]:
        settings_ = params(64, temperature, *filters)
        assert (sample(logits.cuda(), rows, settings_, edits) == sample(logits, rows, settings_, edits)).mean() > 0.98
    assert (argmax(logits.cuda()) == argmax(logits)).all()
