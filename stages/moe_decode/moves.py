"""What changes from one placement of experts to the next, and how little of it has to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowinfer.stages.moe_decode.placement import Ints, Placement, imbalance

LEAST_GAIN = 0.01  # of a layer's imbalance: for less, no weights are worth moving


@dataclass(frozen=True)
class Moves:
    """What changes from one placement to the next: layer, slot and expert of each copy that has to be fetched.

    source int64: a slot that held the expert before, on the same worker if any did (then nothing travels).
    """

    layers: Ints
    slots: Ints
    experts: Ints
    sources: Ints
    local: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.slots)


def moves(before: Placement, after: Placement) -> Moves:
    """The copies that `after` needs and that aren't in their slot yet."""
    layers, slots = np.nonzero(before.experts != after.experts)
    experts = after.experts[layers, slots]
    worker = slots // after.by_worker.shape[2]
    old_worker = np.arange(before.experts.shape[1]) // before.by_worker.shape[2]
    holds = before.experts[layers] == experts[:, None]
    near = holds & (old_worker[None, :] == worker[:, None])
    local = near.any(1)
    return Moves(layers, slots, experts, np.where(local, near.argmax(1), holds.argmax(1)), local)


def settle(before: Placement, after: Placement, loads_WLE: NDArray[np.generic], *, nodes: int = 1) -> Placement:
    """`after`, renamed so that as few experts as possible change workers; a layer that gains next to nothing stays.

    Workers of one node are alike, so which of them gets which set of experts is free: the assignment with the largest
    overlap (Kuhn, 1955) moves the least. Inside a worker an expert keeps its slot.
    """
    if before.experts.shape != after.experts.shape or before.workers != after.workers:
        return after
    gains = imbalance(loads_WLE, after) < imbalance(loads_WLE, before) * (1 - LEAST_GAIN)
    found = before.experts.copy()
    num_experts = int(max(before.experts.max(), after.experts.max())) + 1
    for layer in np.flatnonzero(gains).tolist():
        old, new = before.by_worker[layer], after.by_worker[layer]
        counts = [_one_hot(sets, num_experts) for sets in (new, old)]
        overlap = np.minimum(counts[0][:, None, :], counts[1][None, :, :]).sum(2)
        for part in np.split(np.arange(before.workers), nodes):
            chosen = assign(overlap[np.ix_(part, part)])
            for i, to in enumerate(part[chosen].tolist()):
                size = old.shape[1]
                found[layer, to * size : (to + 1) * size] = _keep_slots(old[to], new[part[i]])
    return Placement(found, before.workers)


def _one_hot(sets: Ints, num_experts: int) -> Ints:
    found = np.zeros((len(sets), num_experts), np.int64)
    np.add.at(found, (np.arange(len(sets))[:, None], sets), 1)
    return found


def _keep_slots(old: Ints, new: Ints) -> Ints:
    """The experts of `new` in an order that leaves in place those that `old` has too."""
    left, kept = new.tolist(), []
    for expert in old.tolist():
        kept.append(expert if expert in left else -1)
        if kept[-1] >= 0:
            left.remove(expert)
    return np.array([left.pop(0) if expert < 0 else expert for expert in kept], np.int64)


def assign(gain_NN: Ints) -> Ints:
    """int64 [N]: the column of each row, all different, whose gains sum to the most (shortest augmenting paths)."""
    cost = (gain_NN.max() - gain_NN).astype(np.float64)
    size = len(cost)
    row_of, u, v = np.full(size, -1), np.zeros(size), np.zeros(size)
    for row in range(size):
        least, came, done = np.full(size, np.inf), np.full(size, -1), np.zeros(size, bool)
        at, column, way = row, -1, 0.0
        while True:
            reach = way + cost[at] - u[at] - v
            better = ~done & (reach < least)
            least[better], came[better] = reach[better], column
            column = int(np.where(done, np.inf, least).argmin())
            way = float(least[column])
            done[column] = True
            if row_of[column] < 0:
                break
            at = int(row_of[column])
        seen = done & (row_of >= 0)
        u[row_of[seen]] += way - least[seen]
        u[row] += way
        v[done] -= way - least[done]
        while column >= 0:
            before = int(came[column])
            row_of[column] = row if before < 0 else row_of[before]
            column = before
    found = np.empty(size, np.int64)
    found[row_of] = np.arange(size)
    return found
