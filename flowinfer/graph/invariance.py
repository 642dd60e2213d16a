"""What a file with `batch_invariant: true` can't have: settings by which bytes would hang on the batch or the past.

What hangs on the machine, a worker proves when it loads its model (flowinfer.engine.models.invariant).
"""

from __future__ import annotations

from flowinfer.graph.devices import count_gpus
from flowinfer.graph.kernel_set import kernel_set
from flowinfer.graph.model import Graph, StageNode
from flowinfer.spec.models import Worker

# Settings of any stage: the values that break the mode, and why.
_BROKEN_BY: dict[str, tuple[tuple[object, ...], str, str]] = {
    "weights": (
        ("fp8",),
        "products of few and of many rows round differently",
        "Leave `weights` out.",
    ),
    "kv_dtype": (
        ("fp8",),
        "a step sees its own keys and values before they are rounded",
        "Leave `kv_dtype` out.",
    ),
    "replay": (
        ("bounded",),
        "a bounded replay is approximate: its bytes hang on where the prefix hit ended",
        "Write `replay: exact`.",
    ),
}


def check_invariance(graph: Graph) -> None:
    """A problem for each setting that breaks the mode; nothing where the file doesn't ask for it."""
    if not graph.document.sections.batch_invariant:
        return
    for stage in graph.stages.values():
        _check_settings(graph, stage)
    _check_devices(graph)


def _check_settings(graph: Graph, stage: StageNode) -> None:
    for name, (values, reason, help) in _BROKEN_BY.items():
        value = getattr(stage.config, name, None)
        if isinstance(value, str) and value in values and name not in stage.inherited:  # else told where it's written
            mark = graph.document.value_mark("stages", stage.name, "with", name)
            note = (graph.document.value_mark("batch_invariant"), "asked for here")
            graph.problem("FI327", f"`{name}: {value}` breaks batch_invariant: {reason}.", mark, help, [note])


def _check_devices(graph: Graph) -> None:
    """Keys and values of one kind of device aren't the bytes of another's."""
    found: dict[str, str] = {}
    for name, worker in _loading(graph).items():
        found.setdefault(device_kind(worker.device), name)
    if len(found) > 1:
        (kind, first), (other, second), *_ = found.items()
        mark = graph.document.value_mark("workers", second, "device")
        message = f"`{second}` computes on {other} and `{first}` on {kind}: batch_invariant holds on one device type."
        note = (graph.document.value_mark("workers", first, "device"), f"`{first}` is here")
        graph.problem("FI327", message, mark, "Give both the same `device`.", [note])


def kernels_of(graph: Graph) -> str:
    """The kernel set of the workers that load models, as this machine has it."""
    kinds = {device_kind(worker.device) for worker in _loading(graph).values()}
    return kernel_set(min(kinds, default="cpu"))


def device_kind(device: str) -> str:
    """cpu or cuda; `auto` is what this machine has."""
    if device == "auto":
        return "cuda" if count_gpus() else "cpu"
    return device.partition(":")[0]


def _loading(graph: Graph) -> dict[str, Worker]:
    """Workers with a stage that loads weights."""
    from flowinfer.graph.placement import workers

    names = {s.worker for s in graph.stages.values() if s.contract and s.contract.model and s.contract.model.weights}
    return {name: worker for name, worker in workers(graph).items() if name in names}
