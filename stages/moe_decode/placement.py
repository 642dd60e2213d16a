"""Which worker holds which experts, and copies of the hot ones. Pure: loads in, slots out. Knows no weights.

Each worker has equally many slots; an expert has at least one, its load is shared evenly by its copies. Two policies:
`sums` is the greedy of the public EPLB (github.com/deepseek-ai/EPLB) over loads summed over steps, `peaks` minimises
the sum over steps of the busiest worker's load, which is what a step waits for.

Dimensions: L layers, E experts, S slots of all workers, R workers, W steps, C copies of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Policy = Literal["peaks", "sums"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class PlacementError(ValueError):
    """Experts, slots, groups, nodes and workers that don't divide."""


@dataclass(frozen=True)
class Placement:
    """experts int64 [L, S]: the expert in each slot; worker r has the slots r * S / R to (r + 1) * S / R."""

    experts: Ints
    workers: int

    def __post_init__(self) -> None:
        if self.experts.shape[1] % self.workers:
            raise PlacementError(f"{self.experts.shape[1]} slots don't divide among {self.workers} workers")

    @property
    def by_worker(self) -> Ints:
        """int64 [L, R, S / R]."""
        return self.experts.reshape(len(self.experts), self.workers, -1)

    def copies(self, num_experts: int) -> Ints:
        """int64 [L, E]: slots that hold each expert."""
        found = np.zeros((len(self.experts), num_experts), np.int64)
        np.add.at(found, (np.arange(len(found))[:, None], self.experts), 1)
        return found

    def loads(self, loads_WLE: NDArray[np.generic]) -> Floats:
        """float64 [W, L, R]: what each worker computes in each step."""
        share = loads_WLE / np.maximum(self.copies(loads_WLE.shape[2]), 1)
        layers = np.arange(len(self.experts))[:, None]
        slots: Floats = share[:, layers, self.experts]
        summed: Floats = slots.reshape(*slots.shape[:2], self.workers, -1).sum(-1)
        return summed


def slots_for(num_experts: int, workers: int, replicas: int) -> int:
    """Slots of all workers for at least `replicas` copies more than experts: equally many on each worker."""
    return -(-(num_experts + replicas) // workers) * workers


def plain(layers: int, num_experts: int, workers: int, slots: int = 0) -> Placement:
    """Experts in order, as many copies of each as there are slots for; 0: none that equal slots don't force."""
    slots = slots or slots_for(num_experts, workers, 0)
    return Placement(np.tile(np.arange(slots) * num_experts // slots, (layers, 1)), workers)


def place(policy: Policy, loads_WLE: NDArray[np.generic], slots: int, workers: int) -> Placement:
    """A placement by this policy from the loads of W steps. Raises PlacementError where the numbers don't divide."""
    _check(loads_WLE.shape[2], slots, workers)
    if policy == "sums":
        return place_by_sums(loads_WLE.sum(0), slots, workers)
    return place_by_peaks(loads_WLE, slots, workers)


def imbalance(loads_WLE: NDArray[np.generic], placement: Placement) -> Floats:
    """float64 [L]: the busiest worker's load over the mean, summed over steps before the division; 1 is even."""
    found = placement.loads(loads_WLE)
    ratio: Floats = found.max(2).sum(0) / np.maximum(found.mean(2).sum(0), 1e-12)
    return ratio


# ------------------------------------------------------------------------------------------------------- sums (EPLB)


def place_by_sums(
    loads_LE: NDArray[np.generic], slots: int, workers: int, *, groups: int = 1, nodes: int = 1
) -> Placement:
    """The public EPLB over summed loads. Hierarchical where the groups divide among the nodes, else global.

    Hierarchical: groups of neighbouring experts are packed on nodes, experts copied inside a node, copies packed on its
    workers, so that a group's traffic stays inside a node. Global: the same with one group and one node.
    """
    if groups % nodes:
        groups = nodes = 1
    layers, num_experts = loads_LE.shape
    if num_experts % groups or slots % nodes or workers % nodes:
        raise PlacementError(f"{num_experts} experts, {groups} groups, {slots} slots, {workers} workers, {nodes} nodes")
    _check(num_experts // nodes, slots // nodes, workers // nodes)
    loads = loads_LE.astype(np.float64)
    size = num_experts // groups
    by_node = pack(loads.reshape(layers, groups, size).sum(2), nodes)  # [L, nodes, groups / nodes]
    members = (by_node[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)  # experts of a node, in order
    own = np.take_along_axis(np.repeat(loads, nodes, 0), members, 1)
    held, copies = replicate(own, slots // nodes)
    share = np.take_along_axis(own / copies, held, 1)
    packed = pack(share, workers // nodes).reshape(layers * nodes, -1)
    local = np.take_along_axis(held, packed, 1)
    return Placement(np.take_along_axis(members, local, 1).reshape(layers, slots), workers)


def pack(weights_LC: Floats, bins: int) -> Ints:
    """int64 [L, bins, C / bins]: the heaviest first, each into the lightest bin that has room, C / bins to a bin."""
    layers, count = weights_LC.shape
    room, rows = count // bins, np.arange(layers)
    found = np.zeros((layers, bins, room), np.int64)
    filled, total = np.zeros((layers, bins), np.int64), np.zeros((layers, bins))
    order = np.argsort(-weights_LC, axis=1, kind="stable")
    for item in order.T:
        lightest = np.where(filled < room, total, np.inf).argmin(1)
        found[rows, lightest, filled[rows, lightest]] = item
        filled[rows, lightest] += 1
        total[rows, lightest] += weights_LC[rows, item]
    return found


def replicate(loads_LE: Floats, slots: int) -> tuple[Ints, Ints]:
    """(experts [L, slots], copies [L, E]): each further slot goes to the expert with the most load a copy."""
    layers, num_experts = loads_LE.shape
    copies, rows = np.ones((layers, num_experts), np.int64), np.arange(layers)
    held = np.tile(np.arange(slots), (layers, 1))
    for slot in range(num_experts, slots):
        hottest = (loads_LE / copies).argmax(1)
        held[:, slot] = hottest
        copies[rows, hottest] += 1
    return held, copies


# ------------------------------------------------------------------------------------------------------------- peaks


def place_by_peaks(loads_WLE: NDArray[np.generic], slots: int, workers: int) -> Placement:
    """Minimises the sum over steps of the busiest worker's load, by two greedy passes; O(S W R L).

    Each further copy goes where it lowers the summed per-step maximum of an expert's load the most; then copies, in
    descending mean load, go to the worker with room whose peak grows the least, one without that expert if there is.
    """
    loads_LWE = np.ascontiguousarray(loads_WLE.transpose(1, 0, 2), np.float32)
    copies = copies_by_peaks(loads_LWE, slots, most=workers)
    layers, _, num_experts = loads_LWE.shape
    share = (loads_LWE / copies[:, None, :]).astype(np.float32)
    experts = np.stack([np.repeat(np.arange(num_experts), row) for row in copies])
    order = np.argsort(-np.take_along_axis(share.mean(1), experts, 1), axis=1, kind="stable")
    return Placement(_fill(share, np.take_along_axis(experts, order, 1), workers).reshape(layers, slots), workers)


def copies_by_peaks(loads_LWE: NDArray[np.float32], slots: int, *, most: int) -> Ints:
    """int64 [L, E] copies of each expert, `slots` in all, at most `most` of one: a worker needs no second copy."""
    layers, _, num_experts = loads_LWE.shape
    copies, rows = np.ones((layers, num_experts), np.int64), np.arange(layers)
    share, means = loads_LWE.copy(), loads_LWE.mean(1)
    for _ in range(num_experts, slots):
        gain = _gains(loads_LWE, share, copies)
        # Where no single copy lowers any peak (two experts tie at each), the one with the most load gets it.
        gain += 1e-6 * means / copies
        gain[copies >= most] = -1
        best = gain.argmax(1)
        copies[rows, best] += 1
        share[rows, :, best] = loads_LWE[rows, :, best] / copies[rows, best][:, None]
    return copies


def _gains(loads_LWE: NDArray[np.float32], share_LWE: NDArray[np.float32], copies_LE: Ints) -> Floats:
    """float64 [L, E]: by how much one more copy of each lowers the sum over steps of the largest share."""
    layers, _, num_experts = share_LWE.shape
    top = share_LWE.argmax(2)[..., None]
    first = np.take_along_axis(share_LWE, top, 2)
    np.put_along_axis(share_LWE, top, -1.0, 2)
    second = share_LWE.max(2, keepdims=True)
    np.put_along_axis(share_LWE, top, first, 2)
    loads, copies = np.take_along_axis(loads_LWE, top, 2), np.take_along_axis(copies_LE, top[..., 0], 1)
    lower = np.maximum(second, loads / (copies[..., None] + 1))
    places = (np.arange(layers)[:, None] * num_experts + top[..., 0]).ravel()
    gains = np.bincount(places, (first - lower).ravel(), layers * num_experts).astype(np.float64)
    return gains.reshape(layers, num_experts)


def _fill(share_LWE: NDArray[np.float32], experts_LC: Ints, workers: int) -> Ints:
    """int64 [L, R, C / R]: experts in this order, each where the sum of per-step peaks grows the least."""
    layers, steps, num_experts = share_LWE.shape
    room, rows = experts_LC.shape[1] // workers, np.arange(layers)
    found = np.full((layers, workers, room), -1, np.int64)
    filled = np.zeros((layers, workers), np.int64)
    total = np.zeros((layers, workers, steps), np.float32)
    peak = np.zeros((layers, 1, steps), np.float32)
    holds = np.zeros((layers, workers, num_experts), bool)
    by_expert = np.ascontiguousarray(share_LWE.transpose(0, 2, 1))
    scratch = np.empty_like(total)
    for expert in experts_LC.T:
        own = by_expert[rows, expert][:, None, :]
        np.add(total, own, out=scratch)
        np.maximum(scratch, peak, out=scratch)
        cost = scratch.sum(2)
        # Among equal peaks the emptier worker, so that what is yet to come finds room below the peak.
        cost += 1e-4 * total.mean(2)
        cost[filled >= room] = np.inf
        taken = holds[rows, :, expert]
        best = np.where(taken & ~(taken | (filled >= room)).all(1, keepdims=True), np.inf, cost).argmin(1)
        found[rows, best, filled[rows, best]] = expert
        filled[rows, best] += 1
        holds[rows, best, expert] = True
        total[rows, best] += own[:, 0]
        np.maximum(peak[:, 0], total[rows, best], out=peak[:, 0])
    return found


def _check(num_experts: int, slots: int, workers: int) -> None:
    if slots < num_experts or slots % workers:
        raise PlacementError(f"{slots} slots on {workers} workers don't hold {num_experts} experts evenly")
