"""What a change costs in memory: measured where workers run, else estimated from weights and KV memory."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from flowinfer.engine.formats import FP8
from flowinfer.errors import FlowInferError
from flowinfer.graph.diff import ABSENT, Change, Diff
from flowinfer.graph.plan import API, Plan
from flowinfer.runtime.arenas import DEFAULT_KV_BYTES
from flowinfer.runtime.loading import Loader, make_config

PROCESS_BYTES = 60 << 20  # of a worker without a model: interpreter, message types, ZeroMQ
TORCH_BYTES = 200 << 20  # more with torch in it
_PACKED_BYTES = {"int4": 5 / 8, "int8": 1.0, FP8: 1.0}  # of a weight, scales included


def resident(pid: int) -> int:
    """Memory of a process as it is now, in bytes; 0 where the system doesn't say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def beside(diff: Diff) -> list[str]:
    """Workers of which one more instance stands while both graphs run, by name, each as often as it does."""
    found = list(diff.workers())
    for change in diff.changes:
        if change.path.endswith(".replicas") and change.after > change.before:
            found += [change.path.split(".")[1]] * (change.after - change.before)
        elif change.path.startswith("workers.") and change.kind == "warm" and change.before == ABSENT:
            found.append(change.path.split(".")[1])  # of an experiment's arm B
    return found


def estimate(plan: Plan, worker: str, load: Loader) -> int:
    """Bytes that one instance of a worker takes once its KV memory is full. Stages of a worker share a model."""
    own, size, models = plan.workers[worker], PROCESS_BYTES, set()
    for stage in (plan.stages[name] for name in own.stages if name != API):
        use = make_config(load(stage), stage).contract().model
        if use is not None and use.weights:
            models.add((use.model, use.packed))
    if models:
        size += TORCH_BYTES + (own.kv_bytes or own.tier_bytes or DEFAULT_KV_BYTES)
    return size + sum(_weights(*model) for model in models)


def _weights(model: str, packed: str) -> int:
    """As in the files; integers come on top, or with `-only` instead of all but the embedding, and FP8 does so too."""
    from flowinfer.engine import hub
    from flowinfer.engine.formats import numbers_of

    with contextlib.suppress(FlowInferError, OSError):
        folder = hub.resolve(model)
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        numbers = numbers_of(packed)
        if not numbers:
            return size
        config = hub.describe(folder).config
        if numbers == FP8:  # of the layers; embedding and head stay as they are
            plain = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
            return round((config.num_params - plain) * _PACKED_BYTES[FP8]) + size * plain // config.num_params
        own = round(config.num_params * _PACKED_BYTES[numbers])
        kept = size if packed == numbers else size * config.vocab_size * config.hidden_size // config.num_params
        return own + kept
    return 0


def refusal(plan: Plan, error: FlowInferError) -> Change:
    """What keeps a plan from running here, as a change that is refused."""
    stage = getattr(error, "stage", "")
    path = f"stages.{stage}" if stage in plan.stages else "file"
    how = f"{error.message} {error.help}".strip()
    return Change(path=path, before="(as it is)", after="(can't run)", kind="refused", how=how)
