"""Can the models that stages load be read, and run in their dtype? Told from small files and headers, without torch.

A model that isn't on this machine is no mistake in a file: what it is shows when it's fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from flowinfer.engine.formats import BLOCK, FP8, PACKED, UNITS, Format, lacks, numbers_of
from flowinfer.errors import ModelError
from flowinfer.graph.devices import CUDA, Capability, capability
from flowinfer.graph.invariance import device_kind
from flowinfer.graph.model import Graph, StageNode
from flowinfer.stage import ModelUse

CapabilityOf = Callable[[str], Capability | None]
DTYPES = ("bfloat16", "float32")  # that a model runs in
NO_FP8 = "DeepseekV4ForCausalLM"  # its products take weights in the model's dtype


def check_weights(graph: Graph) -> None:
    """A problem for each model whose configuration, files, dtype or setting of weights don't do."""
    from flowinfer.engine import hub  # here: a graph without a model needs nothing of the engine
    from flowinfer.engine.models.config import read_config

    _check_devices(graph, capability)
    _check_kv(graph, capability)
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


def _check_devices(graph: Graph, capability_of: CapabilityOf) -> None:
    """Integers are for CPUs, FP8 for GPUs that have units for it and for models that run in bfloat16."""
    from flowinfer.graph.placement import workers

    found = workers(graph)
    said: set[str] = set()
    for stage, use in _uses(graph):
        worker = found.get(stage.worker or "")
        if not numbers_of(use.packed) or worker is None or stage.worker in said:
            continue
        if wrong := _wrong_weights(use, worker.device, capability_of):
            said.add(stage.worker or "")
            mark = stage.inherited.get("weights") or graph.document.value_mark("stages", stage.name, "with", "weights")
            reason, help = wrong
            message = f"`weights: {use.packed}` {reason}, and `{stage.name}` runs on {_said(worker.device)}."
            graph.problem("FI416", message, mark, f"Leave `weights` out{help}.")


def _check_kv(graph: Graph, capability_of: CapabilityOf) -> None:
    """Keys and values in FP8 are for the same devices and models as weights in FP8."""
    from flowinfer.graph.placement import workers

    found = workers(graph)
    for stage, use in _uses(graph):
        worker = found.get(stage.worker or "")
        if use.kv != FP8 or worker is None or "kv_dtype" in stage.inherited:  # else told where it's written
            continue
        if reason := _no_fp8(worker.device, capability_of) or _not_of_fp8(use):
            mark = graph.document.value_mark("stages", stage.name, "with", "kv_dtype")
            message = f"`kv_dtype: fp8` {reason}, and `{stage.name}` runs on {_said(worker.device)}."
            graph.problem("FI417", message, mark, "Leave `kv_dtype` out.")


def _wrong_weights(use: ModelUse, device: str, capability_of: CapabilityOf) -> tuple[str, str] | None:
    """Why these numbers can't be multiplied there, and what else would do."""
    is_cpu = device_kind(device) == "cpu"
    if numbers_of(use.packed) != FP8:
        return None if is_cpu else ("is for CPUs", ", or give the worker `device: cpu`")
    if reason := _no_fp8(device, capability_of):
        return reason, ", or write `weights: int8`" if is_cpu else ""
    reason = _not_of_fp8(use)
    return (reason, "") if reason else None


def _no_fp8(device: str, capability_of: CapabilityOf) -> str:
    """What an FP8 kernel misses on this device, as far as is known here."""
    major, minor = needed = UNITS[FP8][1]
    is_cpu = device_kind(device) == "cpu"
    has = None if is_cpu else capability_of("cuda:0" if device == "auto" else device)
    if not is_cpu and (has is None or has >= needed):
        return ""
    known = f" (it has {has[0]}.{has[1]})" if has else ""
    return f"needs a GPU of compute capability {major}.{minor}{known}"


def _not_of_fp8(use: ModelUse) -> str:
    """Why this model has no kernels for FP8; nothing of one that isn't here."""
    from flowinfer.engine import hub

    folder = hub.known(use.model)
    if folder is None:
        return ""
    with contextlib.suppress(ModelError):
        info = hub.describe(folder)
        if info.architecture == NO_FP8:
            return "isn't for DeepSeek-V4"
        if info.dtype(use.dtype) != "bfloat16":
            return f"is for models in bfloat16, and this one runs in {info.dtype(use.dtype)}"
    return ""


def _said(device: str) -> str:
    kind = "GPU" if device_kind("auto") == "cuda" else "CPU"
    return f"auto (`auto` is a {kind} here)" if device == "auto" else device


def notes(graph: Graph, capability_of: CapabilityOf = capability) -> list[str]:
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
    dtype = info.dtype(use.dtype)
    multiplied = info.architecture != NO_FP8 and info.config.scale_block == BLOCK and dtype == "bfloat16"
    packed: list[Format] = [kind for kind in PACKED if stored.get(kind) and lacks(kind, device, has, multiplied)]
    if not packed:
        return ""
    size = sum(stored.values()) * (4 if dtype == "float32" else 2)
    why = "; ".join(lacks(kind, device, has, multiplied) for kind in packed)
    kinds = " and ".join(kind.upper() for kind in packed)
    return f"weights in {kinds} become {dtype} as they are loaded, {size / 2**20:,.0f} MiB: {why}."


def _uses(graph: Graph) -> list[tuple[StageNode, ModelUse]]:
    uses = [(stage, stage.contract.model) for stage in graph.stages.values() if stage.contract]
    return [(stage, use) for stage, use in uses if use and use.weights and use.model and "${" not in use.model]
