"""KV memory: one anonymous file for each layout, a range of its blocks for each CPU worker instance."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan, StagePlan, WorkerPlan
from flowinfer.runtime.boot import ArenaRange
from flowinfer.runtime.loading import Loader, make_config, stage_error
from flowinfer.stage import Arena, ModelUse

SPARE_INSTANCES = 4  # that a change may add: only addresses are reserved, a page is taken once it's written
DEFAULT_KV_BYTES = 512 << 20  # per worker instance where the file names no size


class Ranges(dict[str, tuple[ArenaRange, ...]]):
    """KV memory by worker instance. spares: ranges that no instance has."""

    def __init__(self) -> None:
        super().__init__()
        self.spares: list[ArenaRange] = []


@dataclass(frozen=True)
class _Share:
    instance: str
    layout: KVLayout
    blocks: int


def model_layouts(plan: Plan, load: Loader) -> dict[str, list[KVLayout]]:
    """The KV layouts that the stages of each worker keep, from their models' configurations. Raises StageError."""
    found: dict[str, list[KVLayout]] = {}
    for name, worker in plan.workers.items():
        for stage in (plan.stages[stage] for stage in worker.stages):
            cls = load(stage)
            model = make_config(cls, stage).contract().model
            if model is not None and model.weights:
                layout = _layout(stage, model, plan.kernels)
                if layout not in found.setdefault(name, []):
                    found[name].append(layout)
    return found


def _layout(stage: StagePlan, model: ModelUse, kernels: str) -> KVLayout:
    from flowinfer.engine import hub

    try:
        info = hub.describe(hub.resolve(model.model))
        return info.layout(model.dtype, kernels=kernels, weights=model.packed, kv=model.kv)
    except FlowInferError as error:
        raise stage_error(stage, error) from error


def make_arenas(plan: Plan, layouts: Mapping[str, list[KVLayout]]) -> Ranges:
    """Creates the memory; the file descriptors stay open in this process for workers that start again."""
    shares = [
        _Share(f"{name}.{replica}", layout, _blocks(worker, layout, len(layouts[name])))
        for name, worker in plan.workers.items()
        if name in layouts and worker.device in ("cpu", "auto")
        for layout in layouts[name]
        for replica in range(worker.replicas)
    ]
    ranges = Ranges()
    for layout in {share.layout.digest: share.layout for share in shares}.values():
        _place([share for share in shares if share.layout == layout], layout, ranges)
    return ranges


def _blocks(worker: WorkerPlan, layout: KVLayout, layouts: int) -> int:
    return max(1, (worker.kv_bytes or worker.tier_bytes or DEFAULT_KV_BYTES) // layouts // layout.block_bytes)


def _place(shares: list[_Share], layout: KVLayout, into: Ranges) -> None:
    spare = max(share.blocks for share in shares)
    total = sum(share.blocks for share in shares) + SPARE_INSTANCES * spare
    fd = anonymous_file(total * layout.block_bytes)
    first = 0
    for share in shares:
        end = first + share.blocks
        own = ArenaRange(
            layout=layout, fd=fd, num_blocks=total, first_block=first, end_block=end, shared=len(shares) > 1
        )
        into[share.instance] = (*into.get(share.instance, ()), own)
        first = end
    for start in range(first, total, spare):
        end = start + spare
        into.spares.append(
            ArenaRange(layout=layout, fd=fd, num_blocks=total, first_block=start, end_block=end, shared=True)
        )


def take_spare(ranges: Ranges, instance: str, layouts: Sequence[KVLayout] = ()) -> None:
    """Gives an instance that comes later memory as its siblings have. Raises FlowInferError when none is left.

    The first of a new worker gets some of its `layouts` where the service has any; else its memory is its own.
    """
    worker = instance.rpartition(".")[0]
    sibling = next((own for name, own in ranges.items() if name.rpartition(".")[0] == worker), ())
    if not sibling:
        known = {spare.layout.digest: spare for spare in ranges.spares}
        sibling = tuple(known[layout.digest] for layout in layouts if layout.digest in known)
    own = [next((spare for spare in ranges.spares if spare.layout == share.layout), None) for share in sibling]
    if None in own:
        message = f"There is KV memory for {SPARE_INSTANCES} more instances than the service started with, and no more."
        raise FlowInferError(message, help="Start the service anew with as many replicas as you need.")
    if own:
        ranges[instance] = tuple(share for share in own if share is not None)
        ranges.spares = [spare for spare in ranges.spares if spare not in ranges[instance]]


def give_spare_back(ranges: Ranges, instance: str) -> None:
    """An instance is gone for good, and nobody reads its blocks any more."""
    ranges.spares += ranges.pop(instance, ())


def arena_fds(ranges: Ranges) -> set[int]:
    """The files behind these ranges."""
    return {arena.fd for own in (*ranges.values(), ranges.spares) for arena in own}


def anonymous_file(size: int) -> int:
    """A file without a name that ends with its last user: a memfd, or an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("flowinfer-kv", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="flowinfer-kv-")
        Path(path).unlink()
    os.ftruncate(fd, size)
    return fd


def map_arena(share: ArenaRange) -> Arena:
    """Maps the memory that the supervisor made; pages are only taken once they are written."""
    memory = mmap.mmap(share.fd, share.num_blocks * share.layout.block_bytes)
    return Arena(
        buffer=memoryview(memory),
        num_blocks=share.num_blocks,
        first_block=share.first_block,
        end_block=share.end_block,
        shared=share.shared,
        quarantined=share.quarantined,
    )


def private_arena(layout: KVLayout, size: int) -> Arena:
    """Memory of this process alone."""
    blocks = max(1, size // layout.block_bytes)
    memory = memoryview(mmap.mmap(-1, blocks * layout.block_bytes))
    return Arena(buffer=memory, num_blocks=blocks, first_block=0, end_block=blocks)
