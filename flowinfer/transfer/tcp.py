"""KV as frames of the workers' own queues, each with its bytes: for ends that share nothing but a network.

A frame is sent from the pool's memory without a copy, and written into the taker's pool by one. On a GPU both stage
it in pinned host memory: blocks come there beside the worker's steps, and their frames leave when they have come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowinfer.message import KVData, KVPushed
from flowinfer.transfer.check import check_of
from flowinfer.transfer.memory import Bytes, Fetching, PoolMemory
from flowinfer.transfer.transport import DamagedBlock, Push, Stopped, Written

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


PATIENCE_S = 0.002  # for the last blocks of a request


@dataclass
class _Leaving:
    """Blocks `first` and on of a transfer, on their way to the host."""

    push: Push
    first: int
    blocks: Fetching


class TcpSender:
    """Puts frames on the queue to the taker, which carry the news of themselves."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.memory = engine, PoolMemory(engine.kv)
        self.layout = engine.layout.digest
        self._leaving: deque[_Leaving] = deque()  # in the order of their copies

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        if self.memory.on_host:
            self._send(push, first, [self.memory.read(block) for block in sources])
        elif len(sources):
            self._leaving.append(_Leaving(push, first, self.memory.fetch(sources)))
            until = time.monotonic() + PATIENCE_S if last else 0.0
            while self._leaving and time.monotonic() < until:
                self.progress()

    def _send(self, push: Push, first: int, blocks: Sequence[Bytes]) -> None:
        for index, data in enumerate(blocks, first):
            frame = KVData(
                id=push.id, ticket=push.ticket, index=index, layout=self.layout, data=data, check=check_of(data)
            )
            self.engine.ctx.send(frame, to=push.to)

    @property
    def pending(self) -> bool:
        return bool(self._leaving)

    def progress(self) -> Sequence[Written | Stopped]:
        while self._leaving and self._leaving[0].blocks.done.query():
            arrived = self._leaving.popleft()
            self._send(arrived.push, arrived.first, list(arrived.blocks.rows))
        return ()

    def cancel(self, ticket: int) -> bool:
        self._leaving = deque(leaving for leaving in self._leaving if leaving.push.ticket != ticket)
        return True  # frames under way are refused by their ticket

    def forget(self, to: str) -> None:
        self._leaving = deque(leaving for leaving in self._leaving if leaving.push.to != to)

    def close(self) -> None:
        self._leaving.clear()


class TcpReceiver:
    """Checks frames and copies them into the pool."""

    is_written_to = False

    def __init__(self, engine: Engine) -> None:
        self.memory = PoolMemory(engine.kv)
        self.layout, self.block_bytes = engine.layout.digest, engine.layout.block_bytes

    def address(self) -> bytes:
        return b""

    def land(self, arrived: KVData | KVPushed, targets: Sequence[int]) -> Sequence[int]:
        assert isinstance(arrived, KVData), "frames bring their bytes"
        data = arrived.data
        if arrived.layout != self.layout or len(data) != self.block_bytes or check_of(data) != arrived.check:
            raise DamagedBlock(f"block {arrived.index} of request {arrived.id} isn't what was sent")
        self.memory.write(targets[arrived.index], data)
        return (arrived.index,)

    def close(self) -> None:
        return None


def make_sender(engine: Engine) -> TcpSender:
    """Of this engine."""
    return TcpSender(engine)


def make_receiver(engine: Engine) -> TcpReceiver:
    """Of this engine."""
    return TcpReceiver(engine)
