"""KV between two GPU workers of one host: the owner writes into the taker's pool, which it maps by CUDA IPC.

The taker names its pool by a handle of the CUDA driver, and an event behind which the blocks that it set aside are at
rest. The owner opens the handle once in the life of that taker, in the background, for the first one of a process takes
seconds. Then one kernel copies all blocks of a push, on a stream of its own, device to device; no byte passes the host.

Copies within a device or over its links aren't checked by us: device memory and NVLink have error correction.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from flowinfer.errors import FlowInferError
from flowinfer.message import Ids, KVData, KVPushed
from flowinfer.transfer.transport import Push, Stopped, TransferError, Written

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

log = logging.getLogger(__name__)
PATIENCE_S = 0.002  # for the last blocks of a request: 4,000 tokens of an 8B model take 0.3 ms on an H200
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


class Copying(Protocol):
    """Blocks on their way; event-like, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether they are all there."""

    def synchronize(self) -> None:
        """Waits until they are."""


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


@dataclass
class _Queued:
    """Blocks that wait until the taker's pool is mapped."""

    ticket: int
    first: int
    ids: Ids
    mark: Any


@dataclass
class _UnderWay:
    ticket: int
    first: int
    count: int
    taker: _Taker
    copying: Copying


@dataclass(eq=False)
class _Taker:
    """A worker whose pool we write to. mapped None: it is being opened."""

    name: str
    generation: int
    address: PoolAddress
    mapped: Any = None
    gone: bool = False
    queue: deque[_Queued] = field(default_factory=deque)


class CudaIpcSender:
    """The owner's half. Everything is for the worker's loop; what may take long runs in its thread pool."""

    def __init__(self, engine: Engine, device: Device) -> None:
        self.engine, self.device = engine, device
        self._takers: dict[str, _Taker] = {}
        self._dead: dict[str, int] = {}  # the last generation of each taker that is gone
        self._under_way: deque[_UnderWay] = deque()  # in the order of the stream
        self._cancelled: set[int] = set()
        self._news: deque[Written | Stopped] = deque()
        self._host = host_id()

    # ----------------------------------------------------------------------------------------------------- the contract

    def push(self, push: Push, first: int, sources: Sequence[int], *, last: bool) -> None:
        taker = self._taker_of(push)
        targets = np.asarray(push.targets[first : first + len(sources)], np.int32)
        if len(targets) and not 0 <= targets.min() <= targets.max() < taker.address.num_blocks:
            raise TransferError(f"{push.to} asks for blocks {targets.tolist()}, which its pool doesn't have.")
        ids = np.stack([targets, np.asarray(sources, np.int32)], 1)
        taker.queue.append(_Queued(push.ticket, first, ids, self.device.mark()))
        self._start(taker)
        if last:
            self._be_patient(push.ticket)

    @property
    def pending(self) -> bool:
        return bool(self._under_way or self._news or any(taker.queue for taker in self._takers.values()))

    def progress(self) -> Sequence[Written | Stopped]:
        self._look()
        news, self._news = list(self._news), deque()
        return news

    def cancel(self, ticket: int) -> bool:
        self._look()
        for taker in self._takers.values():
            taker.queue = deque(queued for queued in taker.queue if queued.ticket != ticket)
        self._news = deque(news for news in self._news if news.ticket != ticket)
        if all(copy.ticket != ticket for copy in self._under_way):
            return True
        self._cancelled.add(ticket)
        return False

    def forget(self, to: str) -> None:
        self._look()
        taker = self._takers.pop(to, None)
        if taker is not None:
            self._dead[to] = taker.generation
            taker.gone = True
            taker.queue.clear()
            self._unmap(taker)

    def close(self) -> None:
        for copy in self._under_way:
            copy.copying.synchronize()
        self._under_way.clear()
        for taker in self._takers.values():
            taker.gone = True
            if taker.mapped is not None:
                self.device.close(taker.mapped)
        self._takers.clear()

    # ---------------------------------------------------------------------------------------------------------- mapping

    def _taker_of(self, push: Push) -> _Taker:
        """The mapped pool, or one that is being opened. Raises TransferError for one that can't be reached."""
        taker = self._takers.get(push.to)
        if taker is not None and taker.generation == push.generation:
            return taker
        if push.generation <= max(self._dead.get(push.to, 0), taker.generation if taker is not None else 0):
            raise TransferError(f"{push.to} of generation {push.generation} is gone.")
        self.forget(push.to)
        address = self._checked(push)
        taker = self._takers[push.to] = _Taker(push.to, push.generation, address)
        self.engine.ctx.submit(partial(self.device.open, address), partial(self._opened, taker))
        return taker

    def _checked(self, push: Push) -> PoolAddress:
        try:
            address = msgspec.msgpack.decode(push.address, type=PoolAddress)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{push.to} doesn't say where its pool is: {error}") from error
        if address.host != self._host:
            help = "Set transport: tcp or nixl on this edge."
            raise TransferError(f"{push.to} runs on another host, where CUDA IPC doesn't reach.", help=help)
        if address.block_bytes != self.engine.layout.block_bytes:
            wanted, got = self.engine.layout.block_bytes, address.block_bytes
            raise TransferError(f"blocks of {push.to} have {got} bytes, and ours {wanted}.")
        return address

    def _opened(self, taker: _Taker, result: Any) -> None:
        if isinstance(result, BaseException):
            if self._takers.get(taker.name) is taker:
                del self._takers[taker.name]  # the next request tries again
            reason = result.message if isinstance(result, FlowInferError) else str(result)
            log.warning("the pool of %s can't be mapped: %s", taker.name, reason)
            tickets = dict.fromkeys(queued.ticket for queued in taker.queue)
            self._news.extend(Stopped(ticket, reason) for ticket in tickets)
            return
        taker.mapped = result
        if taker.gone:
            self._unmap(taker)
        else:
            self._start(taker)

    def _unmap(self, taker: _Taker) -> None:
        """Once nothing is under way to it."""
        if taker.mapped is None or any(copy.taker is taker for copy in self._under_way):
            return
        mapped, taker.mapped = taker.mapped, None
        self.engine.ctx.submit(partial(self.device.close, mapped), partial(_closed, taker.name))

    # ---------------------------------------------------------------------------------------------------------- copying

    def _start(self, taker: _Taker) -> None:
        while taker.mapped is not None and taker.queue:
            queued = taker.queue.popleft()
            copying = self.device.copy(taker.mapped, queued.ids, queued.mark)
            self._under_way.append(_UnderWay(queued.ticket, queued.first, len(queued.ids), taker, copying))

    def _look(self) -> None:
        """Which copies are done, in the order of the stream."""
        while self._under_way and self._under_way[0].copying.query():
            self._arrived(self._under_way.popleft())

    def _arrived(self, copy: _UnderWay) -> None:
        is_last = all(other.ticket != copy.ticket for other in self._under_way)
        if copy.taker.gone:
            self._unmap(copy.taker)
        elif copy.ticket not in self._cancelled:
            self._news.append(Written(copy.ticket, copy.first, [0] * copy.count))
        elif is_last:
            self._news.append(Stopped(copy.ticket))
        if is_last:
            self._cancelled.discard(copy.ticket)

    def _be_patient(self, ticket: int) -> None:
        """Waits for what somebody waits for, if it takes no longer than telling of it later would."""
        until = time.monotonic() + PATIENCE_S
        last = next((copy for copy in reversed(self._under_way) if copy.ticket == ticket), None)
        while last is not None and not last.copying.query() and time.monotonic() < until:
            pass


def _closed(name: str, result: Any) -> None:
    if isinstance(result, BaseException):
        log.warning("the pool of %s can't be unmapped: %s", name, result)


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


def make_sender(engine: Engine) -> CudaIpcSender:
    """Of this engine. Raises TransferError off a GPU."""
    return CudaIpcSender(engine, _device(engine))


def make_receiver(engine: Engine) -> CudaIpcReceiver:
    """Of this engine. Raises TransferError off a GPU, and for memory that can't be shared."""
    return CudaIpcReceiver(engine, _device(engine))


def _device(engine: Engine) -> Device:
    if engine.kv.device.type != "cuda":
        raise TransferError("cuda_ipc needs a GPU at both ends.", help="Set transport: auto.")
    from flowinfer.transfer.cuda_device import CudaDevice

    return CudaDevice(engine.kv, engine.layout.block_bytes)
