"""Can the models that stages load be read, and run in their dtype? Told from small files and headers, without torch.

A model that isn't on this machine is no mistake in a file: what it is shows when it's fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowinfer.engine.formats import PACKED, Format, lacks, numbers_of
from flowinfer.errors import ModelError
from flowinfer.graph.devices import CUDA, Capability, capability
from flowinfer.graph.invariance import device_kind
from flowinfer.graph.model import Graph, StageNode
from flowinfer.stage import ModelUse

DTYPES = ("bfloat16", "float32")  # that a model runs in


def check_weights(graph: Graph) -> None:
    """A problem for each model whose configuration, files or dtype don't do."""
    from flowinfer.engine import hub  # here: a graph without a model needs nothing of the engine
    from flowinfer.engine.models.config import read_config

    _check_devices(graph)
    seen: set[tuple[str, str]] = set()
    for stage, use in _uses(graph):
        folder = hub.known(use.model)
        if folder is None or (use.model, use.dtype) in seen:
            continue
        seen.add((use.model, use.dtype))
        setting, error = "model", None
        try:
            config = read_config(folder)
            hub.stored(folder, config)
            if use.dtype == "auto" and config.dtype not in DTYPES:
                setting = "dtype"
                help = f"Write `dtype: bfloat16` or `dtype: float32` in `{stage.name}`."
                error = ModelError(f"its weights are {config.dtype}, which no model runs in.", help=help)
        except ModelError as found:
            error = found
        if error is not None:
            mark = stage.inherited.get(setting) or graph.document.value_mark("stages", stage.name, "with", setting)
            graph.problem("FI326", f"{use.model} can't run: {error.message}", mark, error.help)


def _check_devices(graph: Graph) -> None:
    """Quantized weights are for CPUs."""
    from flowinfer.graph.placement import workers

    found = workers(graph)
    said: set[str] = set()
    for stage, use in _uses(graph):
        worker = found.get(stage.worker or "")
        if numbers_of(use.packed) and worker and device_kind(worker.device) != "cpu" and stage.worker not in said:
            said.add(stage.worker or "")
            mark = stage.inherited.get("weights") or graph.document.value_mark("stages", stage.name, "with", "weights")
            here = " (`auto` is a GPU here)" if worker.device == "auto" else ""
            message = f"`weights: {use.packed}` is for CPUs, and `{stage.name}` runs on {worker.device}{here}."
            graph.problem("FI416", message, mark, "Leave `weights` out, or give the worker `device: cpu`.")


def notes(graph: Graph, capability_of: Callable[[str], Capability | None] = capability) -> list[str]:
    """Where a GPU gets weights in FP8 or FP4 as another dtype: why, and how much that is."""
    from flowinfer.engine import hub
    from flowinfer.graph.planner import plan_of

    workers = plan_of(graph).workers
    found: dict[tuple[str, str], str] = {}
    for stage, use in _uses(graph):
        folder, worker = hub.known(use.model), workers.get(stage.worker or "")
        if folder and worker and worker.device.startswith(CUDA) and (use.model, worker.device) not in found:
            text = _change(folder, use, worker.device, capability_of(worker.device))
            found[use.model, worker.device] = f"{use.model} on {worker.device}: {text}" if text else ""
    return [text for text in found.values() if text]


def _change(folder: Path, use: ModelUse, device: str, has: Capability | None) -> str:
    from flowinfer.engine import hub

    info = hub.describe(folder)
    stored = hub.stored(folder, info.config)
    packed: list[Format] = [kind for kind in PACKED if stored.get(kind)]
    if not packed:
        return ""
    dtype = info.dtype(use.dtype)
    size = sum(stored.values()) * (4 if dtype == "float32" else 2)
    why = "; ".join(lacks(kind, device, has) for kind in packed)
    kinds = " and ".join(kind.upper() for kind in packed)
    return f"weights in {kinds} become {dtype} as they are loaded, {size / 2**20:,.0f} MiB: {why}."


def _uses(graph: Graph) -> list[tuple[StageNode, ModelUse]]:
    uses = [(stage, stage.contract.model) for stage in graph.stages.values() if stage.contract]
    return [(stage, use) for stage, use in uses if use and use.weights and use.model and "${" not in use.model]
