"""Which device a worker runs on, and how much of its memory may hold KV. Imports torch when asked, never before."""

from __future__ import annotations

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError
from flowinfer.stage import Arena

GPU_SHARE = 0.9  # of a GPU's memory, for weights and KV; the rest is for activations and the CUDA context


def resolve_device(asked: str, index: int = 0) -> str:
    """`cpu` or `cuda:N`. auto takes a GPU if this torch sees one, the index-th instance the index-th GPU, else the CPU.

    Raises FlowInferError for a GPU that isn't there.
    """
    if asked == "cpu":
        return asked
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return f"cuda:{index % count}" if count else "cpu"
    number = int(asked.partition(":")[2] or 0)
    if number >= count:
        has = f"{count} GPUs, counted from cuda:0" if count else "no GPU that this torch can use"
        raise FlowInferError(f"There is no {asked} here: this machine has {has}.", help="Use device: auto or cpu.")
    return f"cuda:{number}"


def gpu_arena(layout: KVLayout, kv_bytes: int, sharers: int) -> Arena:
    """Blocks on a GPU, which nobody else maps. kv_bytes 0: as many as fit its share, once the weights are loaded."""
    blocks = kv_bytes // layout.block_bytes
    return Arena(
        buffer=memoryview(b""),
        num_blocks=blocks,
        first_block=0,
        end_block=blocks,
        device_share=GPU_SHARE / max(1, sharers),
    )
