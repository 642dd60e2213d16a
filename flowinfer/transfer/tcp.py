"""KV as frames of the workers' own queues, each with its bytes: for ends that share nothing but a network.

A frame is sent from the pool's memory without a copy, and written into the taker's pool by one; on a GPU both ends
stage it in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowinfer.message import KVData, KVPushed
from flowinfer.transfer.check import check_of
from flowinfer.transfer.memory import PoolMemory
from flowinfer.transfer.transport import DamagedBlock, Push, Stopped, Written

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


class TcpSender:
    """Puts frames on the queue to the taker, which carry the news of themselves."""

    pending = False

    def __init__(self, engine: Engine) -> None:
        self.engine, self.memory = engine, PoolMemory(engine.kv)
        self.layout = engine.layout.digest

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        for index, block in enumerate(sources, first):
            data = self.memory.read(block)
            frame = KVData(
                id=push.id, ticket=push.ticket, index=index, layout=self.layout, data=data, check=check_of(data)
            )
            self.engine.ctx.send(frame, to=push.to)

    def progress(self) -> Sequence[Written | Stopped]:
        return ()

    def cancel(self, ticket: int) -> bool:
        return True  # frames under way are refused by their ticket

    def forget(self, to: str) -> None:
        return None

    def close(self) -> None:
        return None


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
