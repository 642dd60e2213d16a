"""Placement of experts: the public test vector, the better objective, and that little moves."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from flowinfer.stages.moe_decode.moves import assign, moves, settle
from flowinfer.stages.moe_decode.placement import (
    Placement,
    PlacementError,
    Policy,
    copies_by_peaks,
    imbalance,
    place,
    place_by_sums,
    plain,
    replicate,
    slots_for,
)

# The example of the public EPLB's README (github.com/deepseek-ai/EPLB): loads, and where each slot's expert comes from.
LOADS = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
SLOTS = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
POLICIES: tuple[Policy, ...] = ("sums", "peaks")


def some_loads(steps: int = 40, layers: int = 3, experts: int = 24, seed: int = 0) -> np.ndarray:
    """Rows by expert where a few are hot, and hot at different steps."""
    rng = np.random.default_rng(seed)
    heat = rng.gamma(0.7, 1.0, (2, layers, experts))
    heat /= heat.sum(2, keepdims=True)
    return np.stack([[rng.multinomial(64, p) for p in heat[step % 2]] for step in range(steps)])


def test_the_public_vector() -> None:
    found = place_by_sums(LOADS, 16, 8, groups=4, nodes=2)
    assert found.experts.tolist() == SLOTS


def test_groups_that_dont_divide_are_placed_globally() -> None:
    found = place_by_sums(LOADS, 16, 8, groups=4, nodes=3)
    assert found.experts.tolist() == place_by_sums(LOADS, 16, 8).experts.tolist()
    assert found.experts.tolist() != SLOTS


def test_copies_go_to_the_most_load_a_copy() -> None:
    held, copies = replicate(np.array([[8.0, 3.0, 1.0]]), 6)
    assert held.tolist() == [[0, 1, 2, 0, 0, 1]] and copies.tolist() == [[3, 2, 1]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("workers", "replicas"), [(4, 0), (4, 4), (8, 8), (12, 12), (24, 24)])
def test_every_expert_has_a_slot_and_every_worker_as_many(policy: Policy, workers: int, replicas: int) -> None:
    loads = some_loads()
    slots = slots_for(24, workers, replicas)
    found = place(policy, loads, slots, workers)
    assert found.by_worker.shape == (3, workers, slots // workers)
    assert (found.copies(24) >= 1).all() and slots >= 24 + replicas
    np.testing.assert_allclose(found.loads(loads).sum(2), loads.sum(2))


@pytest.mark.parametrize("workers", [4, 8, 12])
def test_peaks_wait_less_than_sums_and_both_less_than_none(workers: int) -> None:
    loads = some_loads()
    slots = slots_for(24, workers, workers)
    none, sums, peaks = (
        imbalance(loads, p).mean()
        for p in (plain(3, 24, workers), *(place(p, loads, slots, workers) for p in POLICIES))
    )
    assert 1 <= peaks < sums < none


def test_a_step_waits_for_its_busiest_worker() -> None:
    """Two experts that are hot at different steps may share a worker; two that are hot together may not."""
    loads = np.array([[[8, 8, 0, 0]], [[0, 0, 8, 8]]])
    found = place("peaks", loads, 4, 2)
    assert {frozenset(row) for row in found.by_worker[0].tolist()} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )
    assert imbalance(loads, found).tolist() == [1.0]


def test_a_copy_goes_where_it_lowers_the_sum_of_peaks() -> None:
    """Expert 0 has the most load in all, but expert 1 makes more of the peaks."""
    loads = np.array([[[5, 9, 1]], [[5, 9, 1]], [[9, 0, 1]], [[5, 0, 1]]], np.float32)
    assert copies_by_peaks(loads.transpose(1, 0, 2), 4, most=4).tolist() == [[1, 2, 1]]
    assert replicate(loads.sum(0).astype(float), 4)[1].tolist() == [[2, 1, 1]]


def test_two_that_always_tie_each_get_a_copy() -> None:
    loads = np.array([[[0, 8, 8, 0]]] * 3, np.float32)
    assert copies_by_peaks(loads.transpose(1, 0, 2), 6, most=4).tolist() == [[1, 2, 2, 1]]


def test_copies_of_one_expert_are_on_different_workers() -> None:
    loads = np.array([[[30, 1, 1, 1]]] * 5)
    found = place("peaks", loads, 8, 4)
    assert all(len(set(row)) == len(row) for row in found.by_worker[0].tolist())


def test_assignment_is_the_best_there_is() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 5, 6):
        for _ in range(20):
            gain = rng.integers(0, 5, (size, size))
            best = max(sum(gain[i, p[i]] for i in range(size)) for p in permutations(range(size)))
            found = assign(gain)
            assert sorted(found.tolist()) == list(range(size))
            assert gain[np.arange(size), found].sum() == best


def test_the_same_sets_on_other_workers_move_nothing() -> None:
    loads = some_loads()
    before = plain(3, 24, 6)
    after = place("peaks", loads, 24, 6)
    renamed = Placement(np.flip(after.by_worker, (1, 2)).reshape(3, -1), 6)
    settled = settle(after, renamed, loads)
    assert len(moves(after, renamed)) and not len(moves(after, settled))
    assert len(moves(before, settle(before, after, loads))) < len(moves(before, after))


def test_settling_changes_no_load() -> None:
    loads = some_loads()
    before, after = plain(3, 24, 6), place("peaks", loads, 24, 6)
    np.testing.assert_allclose(imbalance(loads, settle(before, after, loads)), imbalance(loads, after))


def test_a_layer_that_gains_nothing_stays() -> None:
    loads = some_loads()
    good = place("peaks", loads, 24, 6)
    assert settle(good, plain(3, 24, 6), loads).experts.tolist() == good.experts.tolist()


def test_sets_are_renamed_inside_a_node_only() -> None:
    loads = np.zeros((1, 1, 8))
    loads[0, 0, :2] = 1
    before = Placement(np.arange(8)[None], 4)  # both hot experts on worker 0
    after = Placement(np.array([[4, 5, 6, 7, 1, 2, 0, 3]]), 4)
    assert len(moves(before, settle(before, after, loads))) == 2
    inside = settle(before, after, loads, nodes=2)
    assert len(moves(before, inside)) == 8
    assert {frozenset(row) for row in inside.by_worker[0, :2].tolist()} == {frozenset({4, 5}), frozenset({6, 7})}


def test_moves_name_a_source_and_whether_it_travels() -> None:
    before = Placement(np.array([[0, 1, 2, 3]]), 2)
    after = Placement(np.array([[0, 0, 2, 1]]), 2)
    found = moves(before, after)
    assert found.slots.tolist() == [1, 3] and found.experts.tolist() == [0, 1]
    assert found.sources.tolist() == [0, 1] and found.local.tolist() == [True, False]


@pytest.mark.parametrize(("slots", "workers"), [(23, 1), (26, 4), (16, 8)])
def test_what_doesnt_divide_is_refused(slots: int, workers: int) -> None:
    with pytest.raises(PlacementError):
        place("peaks", some_loads(), slots, workers)
