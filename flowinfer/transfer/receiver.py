"""How the KV of a computed sequence comes into this worker: handed over, leased in shared memory, or pushed as frames.

A receiver is the decode side of a KV edge. `auto` picks per sequence, by where its KV lies. Knows nothing of queues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from flowinfer.errors import RequestError
from flowinfer.message import KVData, KVFetch, KVHandle, KVRelease, Sequence
from flowinfer.transfer.check import check_of
from flowinfer.transfer.transport import DamagedBlock

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


class NoRoom(RequestError):
    """There are no free blocks for a sequence now."""


class Receiver(Protocol):
    """One way to take over KV."""

    def accept(self, sequence: Sequence, handle: KVHandle) -> bool:
        """Starts the transfer; True when the sequence can be decoded at once. RequestError where it can't be done."""

    def receive(self, data: KVData) -> Sequence | None:
        """Takes one block; returns its sequence when that was the last one. Raises DamagedBlock."""

    def cancel(self, request: str) -> None:
        """Drops a transfer that is under way."""


class LocalReceiver:
    """Prefill and decode share an engine: the blocks stay where they are, held under the same request id."""

    def accept(self, sequence: Sequence, handle: KVHandle) -> bool:
        return True

    def receive(self, data: KVData) -> Sequence | None:
        return None

    def cancel(self, request: str) -> None:
        return None


class LeaseReceiver:
    """Both workers map one arena: the sequence is read and continued in place, on lease. Costs no copy."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accept(self, sequence: Sequence, handle: KVHandle) -> bool:
        self.engine.adopt(sequence, handle, blocks=handle.blocks.tolist(), leased=True)
        return True

    def receive(self, data: KVData) -> Sequence | None:
        return None

    def cancel(self, request: str) -> None:
        return None


class CopyReceiver:
    """Both workers map one arena, but the owner is about to go: its blocks are copied into ours, at memory speed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accept(self, sequence: Sequence, handle: KVHandle) -> bool:
        blocks = _own_blocks(self.engine, handle)
        self.engine.copy_blocks(blocks, handle.blocks[: len(blocks)].tolist())
        self.engine.adopt(sequence, handle, blocks=blocks, leased=False)
        _done(self.engine, sequence)
        return True

    def receive(self, data: KVData) -> Sequence | None:
        return None

    def cancel(self, request: str) -> None:
        return None


class FrameReceiver:
    """The workers share no memory: the owner pushes each block as a frame, which is written into a block of ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._missing: dict[str, set[int]] = {}
        self._sequence: dict[str, Sequence] = {}

    def accept(self, sequence: Sequence, handle: KVHandle) -> bool:
        blocks = _own_blocks(self.engine, handle)
        self.engine.adopt(sequence, handle, blocks=blocks, leased=False)
        if not blocks:
            _done(self.engine, sequence)
            return True
        self._missing[sequence.id], self._sequence[sequence.id] = set(range(len(blocks))), sequence
        ctx, wanted = self.engine.ctx, np.array(blocks, np.int32)
        fetch = KVFetch(
            id=sequence.id, to=ctx.worker, generation=ctx.generation, ticket=0, transport="tcp", blocks=wanted
        )
        ctx.send(fetch, to=handle.owner)
        return False

    def receive(self, data: KVData) -> Sequence | None:
        missing = self._missing.get(data.id)
        if missing is None or data.index not in missing or data.layout != self.engine.layout.digest:
            return None
        if check_of(data.data) != data.check:
            raise DamagedBlock(f"block {data.index} of request {data.id} isn't what was sent")
        self.engine.write_block(self.engine.held[data.id].blocks[data.index], data.data)
        missing.discard(data.index)
        if missing:
            return None
        del self._missing[data.id]
        sequence = self._sequence.pop(data.id)
        _done(self.engine, sequence)
        return sequence

    def cancel(self, request: str) -> None:
        self._missing.pop(request, None)
        self._sequence.pop(request, None)

    def abandon(self, request: str) -> Sequence | None:
        """Gives up waiting for blocks; returns the sequence that they were to complete."""
        self._missing.pop(request, None)
        return self._sequence.pop(request, None)


def _own_blocks(engine: Engine, handle: KVHandle) -> list[int]:
    count = engine.layout.blocks_for(handle.num_tokens)
    blocks = engine.pool.allocate(count)
    if blocks is None:
        raise NoRoom(503, f"No room for the {count} KV blocks of this request.", code="kv_exhausted")
    return blocks


def _done(engine: Engine, sequence: Sequence) -> None:
    """The copy is complete: the owner may free its blocks, and ours are no longer anybody's lease."""
    held = engine.held[sequence.id]
    owner, held.owner = held.owner, None
    if owner is not None:
        engine.ctx.send(KVRelease(id=sequence.id, lessee=engine.ctx.worker), to=owner)
    engine.commit(held, sequence.history)
