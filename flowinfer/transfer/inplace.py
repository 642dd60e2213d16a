"""KV whose memory both workers map: read where it lies, on lease, or copied within it at memory speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowinfer.message import KVHandle, KVRelease, Sequence

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


def lease(engine: Engine, sequence: Sequence, handle: KVHandle) -> None:
    """The sequence is read and continued in the owner's blocks, until our KVRelease. Costs no copy."""
    engine.adopt(sequence, handle, blocks=handle.blocks.tolist(), leased=True)


def copy(engine: Engine, sequence: Sequence, handle: KVHandle) -> bool:
    """The owner is about to go: its blocks are copied into ours, and it may free them. False: there's no room."""
    blocks = engine.pool.allocate(engine.layout.blocks_for(handle.num_tokens))
    if blocks is None:
        return False
    engine.copy_blocks(blocks, handle.blocks[: len(blocks)].tolist())
    held = engine.adopt(sequence, handle, blocks=blocks, leased=False)
    held.owner = None
    engine.ctx.send(KVRelease(id=sequence.id, lessee=engine.ctx.worker), to=handle.owner)
    engine.commit(held, sequence.history)
    return True
