"""KV between two GPU workers of one host: the owner writes into the taker's pool, which it maps by CUDA IPC.

The taker names its pool by a handle of the CUDA driver, and an event behind which the blocks that it set aside are at
rest. The owner opens the handle once in the life of that taker; then one kernel copies all blocks of a push, on a
stream of its own, device to device, and no byte passes the host.

Copies within a device or over its links aren't checked by us: device memory and NVLink have error correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from flowinfer.message import Ids, KVData, KVPushed
from flowinfer.transfer.links import Copying, read_address
from flowinfer.transfer.pushing import LinkSender
from flowinfer.transfer.transport import Push, TransferError

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PoolAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a pool lies: `offset` bytes behind the start of the allocation that `handle` names, on this host.

    event: behind which blocks that were set aside are at rest: what the taker's device still did with them is done.
    """

    host: str
    handle: bytes
    offset: int
    num_blocks: int
    block_bytes: int
    event: bytes = b""


class Device(Protocol):
    """What the two halves ask of a GPU; tests stand in for it."""

    def export(self) -> tuple[bytes, int, bytes]:
        """Our pool as others may map it: handle of its allocation, offset in it, handle of the event `rest` records."""

    def rest(self) -> None:
        """Records the exported event behind what the device has been told to do by now."""

    def open(self, address: PoolAddress) -> Any:
        """Maps the pool of another process. For background threads: may take seconds. Raises FlowInferError."""

    def close(self, mapped: Any) -> None:
        """Unmaps it; nothing may be under way. For background threads."""

    def mark(self) -> Any:
        """What the device has been told to do by now; a copy waits for it."""

    def copy(self, mapped: Any, ids: Ids, mark: Any) -> Copying:
        """Starts to copy our block ids[b, 1] over block ids[b, 0] of a mapped pool, for each b."""


class CudaLinks:
    """Mapped pools of the GPU workers of this host."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.open, self.close, self.mark, self.copy = device.open, device.close, device.mark, device.copy
        self._host = host_id()

    def read(self, push: Push) -> PoolAddress:
        address = read_address(push, PoolAddress)
        if address.host != self._host:
            help = "Set transport: tcp or nixl on this edge."
            raise TransferError(f"{push.to} runs on another host, where CUDA IPC doesn't reach.", help=help)
        return address

    def checks(self, ids: Ids) -> list[int]:
        return [0] * len(ids)


class CudaIpcReceiver:
    """The taker's half: says where the pool is; what is written to it is there once the owner says so."""

    is_written_to = True

    def __init__(self, engine: Engine, device: Device) -> None:
        self.device = device
        handle, offset, event = device.export()
        block_bytes = engine.layout.block_bytes
        where = PoolAddress(host_id(), handle, offset, len(engine.kv), block_bytes, event)
        self._address = msgspec.msgpack.encode(where)

    def address(self) -> bytes:
        """To be called for each request: what our device still does with its blocks has to end first."""
        self.device.rest()
        return self._address

    def land(self, arrived: KVData | KVPushed, targets: Sequence[int]) -> Sequence[int]:
        assert isinstance(arrived, KVPushed), "what is written to our pool brings no bytes"
        return range(arrived.first, arrived.first + len(arrived.checks))

    def close(self) -> None:
        return None


def host_id() -> str:
    """The same in all processes of a running host, and nowhere else."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def make_sender(engine: Engine) -> LinkSender:
    """Of this engine. Raises TransferError off a GPU."""
    return LinkSender(engine, CudaLinks(_device(engine)))


def make_receiver(engine: Engine) -> CudaIpcReceiver:
    """Of this engine. Raises TransferError off a GPU, and for memory that can't be shared."""
    return CudaIpcReceiver(engine, _device(engine))


def _device(engine: Engine) -> Device:
    if engine.kv.device.type != "cuda":
        raise TransferError("cuda_ipc needs a GPU at both ends.", help="Set transport: auto.")
    from flowinfer.transfer.cuda_device import CudaDevice

    return CudaDevice(engine.kv, engine.layout.block_bytes)
