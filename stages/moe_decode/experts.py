"""Watches which experts are hot while this worker decodes, and plans where copies of them would lie.

What is planned is measured on the steps that follow and told by metrics. Weights stay where they are: each worker
computes with all experts.
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from flowinfer.engine.expert_load import STEPS, Counts, LoadWindow
from flowinfer.errors import ModelError
from flowinfer.observe import metrics
from flowinfer.stage import Context, StageConfig
from flowinfer.stages.moe_decode.moves import moves, settle
from flowinfer.stages.moe_decode.placement import Placement, imbalance, place, plain, slots_for

log = logging.getLogger(__name__)
_PER_WORKER = " per worker"


class Experts(StageConfig):
    """replicas: copies of hot experts beyond one of each, `1 per worker` or a number in all; every worker has as many
    slots, so there may be a few more.  rebalance: decode steps from one placement to the next, the first after a
    quarter of that; 0 plans none.  workers: that share the experts; 0: those that decode in this graph.

    policy: peaks minimises what the busiest worker of each step has to do, sums the busiest worker's load of all steps.
    """

    replicas: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^[0-9]+ per worker$")] = "1 per worker"
    rebalance: int = Field(default=0, ge=0)
    workers: int = Field(default=0, ge=0)
    policy: Literal["peaks", "sums"] = "peaks"

    def slots(self, num_experts: int, workers: int) -> int:
        """Slots of all workers."""
        if isinstance(self.replicas, int):
            return slots_for(num_experts, workers, self.replicas)
        return slots_for(num_experts, workers, workers * int(self.replicas.removesuffix(_PER_WORKER)))


def misfit(model: str) -> tuple[str, str] | None:
    """What speaks against placing experts of this model, and what would do; None for one that isn't here."""
    from flowinfer.engine import hub
    from flowinfer.engine.models.config import read_config

    folder = hub.known(model)
    try:
        if folder is None or read_config(folder).moe_layers:
            return None
    except ModelError:
        return None  # told as such
    return f"`experts.rebalance` places experts, and {model} has none.", "Leave `experts` out."


class Planned(NamedTuple):
    """What a look at the window gave: imbalance as experts lie in order and as placed, and a new placement if due."""

    in_order: float
    placed: float
    placement: Placement
    num_moves: int
    is_new: bool


class ExpertPlanner:
    """Looks at the decode window every STEPS steps and places anew when it's time, in the worker's pool."""

    def __init__(self, ctx: Context, window: LoadWindow, config: Experts) -> None:
        self.ctx, self.window = ctx, window
        self.placement: Placement | None = None
        self._looking = False
        self.reconfigure(config)
        labels = {"stage": ctx.stage}
        ratio = metrics.gauge("expert_worker_peak_ratio")
        self._in_order, self._placed = (ratio.labels(**labels, placement=name) for name in ("in order", "planned"))
        self._placements = metrics.counter("expert_placements_total").labels(**labels)
        self._moves = metrics.counter("expert_moves_total").labels(**labels)

    def reconfigure(self, config: Experts) -> None:
        """Works by these settings from the next step on."""
        self.config = config
        self._look_at = self.window.num_steps + STEPS
        self._place_at = self.window.num_steps + max(1, config.rebalance // 4)

    def between_steps(self) -> None:
        """Starts a look, when it's time for one. Costs a comparison on other steps."""
        if not self.config.rebalance or self._looking or self.window.num_steps < min(self._look_at, self._place_at):
            return
        steps = self.window.num_steps
        due = steps >= self._place_at
        self._look_at = steps + STEPS
        if due:
            self._place_at = steps + self.config.rebalance
        workers = self.config.workers or 1 + len(self.ctx.instances("moe-decode"))
        if workers < 2:
            return  # one worker has them all
        self._looking = True
        loads, config, before = self.window.recent(), self.config, self.placement
        self.ctx.submit(lambda: look(loads, config, workers, before, due), self._looked)

    def _looked(self, result: Planned | BaseException) -> None:
        self._looking = False
        if isinstance(result, BaseException):  # no request is lost for it
            log.error("%s: the placement of experts stays as it is", self.ctx.stage, exc_info=result)
            return
        self._in_order.set(result.in_order)
        self._placed.set(result.placed)
        if result.is_new:
            self._placements.inc()
            self._moves.inc(result.num_moves)
        self.placement = result.placement


def look(loads_WLE: Counts, config: Experts, workers: int, before: Placement | None, due: bool) -> Planned:
    """Measures the placement so far on these steps and, where due, makes the next. Pure; for the pool."""
    _, layers, num_experts = loads_WLE.shape
    in_order, slots = plain(layers, num_experts, workers), config.slots(num_experts, workers)
    if before is None or before.experts.shape[1] != slots or before.workers != workers:
        before, due = plain(layers, num_experts, workers, slots), True
    now, placed = (float(np.mean(imbalance(loads_WLE, each))) for each in (in_order, before))
    if not due:
        return Planned(now, placed, before, 0, is_new=False)
    after = settle(before, place(config.policy, loads_WLE, slots, workers), loads_WLE)
    return Planned(now, placed, after, len(moves(before, after)), is_new=True)
