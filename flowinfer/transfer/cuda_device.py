"""One GPU as cuda_ipc uses it: its pool named for other processes, theirs mapped, blocks copied by a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowinfer.kernels import arch
from flowinfer.kernels.copy_blocks import DeviceMemory, copy_blocks
from flowinfer.message import Ids
from flowinfer.transfer import cuda_driver
from flowinfer.transfer.cuda_ipc import PoolAddress
from flowinfer.transfer.transport import TransferError

NUM_SLOTS = 32  # copies whose block ids are on their way to the device at once; one more waits for the oldest
SLOT_ROWS = 4_096  # blocks of a copy; more take another launch


@dataclass
class Mapped:
    """The pool of another process. event: behind which its blocks are at rest."""

    handle: bytes
    memory: DeviceMemory
    event: torch.cuda.Event | None


@dataclass
class _Slot:
    """Block ids of one launch on their way: pinned, and on the device."""

    host: Tensor
    ids_B2: Tensor
    done: torch.cuda.Event


class CudaDevice:
    """The device of an arena `kv` [blocks, ...], contiguous."""

    def __init__(self, kv: Tensor, block_bytes: int) -> None:
        self.kv, self.block_bytes = kv, block_bytes
        self._by_kernel = arch.supported("copy_blocks", str(kv.device), str(kv.dtype).removeprefix("torch."))
        with torch.cuda.device(kv.device):
            self._stream = torch.cuda.Stream(kv.device)
            self._slots = [self._slot() for _ in range(NUM_SLOTS)]
            self._rest: torch.cuda.Event | None = None
        self._turn = 0

    def _slot(self) -> _Slot:
        shape = (SLOT_ROWS, 2)
        host = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        return _Slot(host, torch.empty(shape, dtype=torch.int32, device=self.kv.device), torch.cuda.Event())

    # ------------------------------------------------------------------------------------------------------------ taker

    def export(self) -> tuple[bytes, int, bytes]:
        with torch.cuda.device(self.kv.device):
            torch.cuda.current_stream().synchronize()  # makes the context current in this thread
            try:
                handle, offset = cuda_driver.export(self.kv.data_ptr())
            except cuda_driver.CudaError as error:
                help = "Set transport: tcp, or run without expandable_segments in PYTORCH_CUDA_ALLOC_CONF."
                raise TransferError(
                    f"the KV memory of {self.kv.device} can't be shared: {error.message}", help=help
                ) from error
            self._rest = torch.cuda.Event(interprocess=True)
            self._rest.record()
            return handle, offset, bytes(self._rest.ipc_handle())

    def rest(self) -> None:
        assert self._rest is not None, "exported before"
        with torch.cuda.device(self.kv.device):
            self._rest.record()

    # ------------------------------------------------------------------------------------------------------------ owner

    def open(self, address: PoolAddress) -> Mapped:
        torch.cuda.set_device(self.kv.device)  # of this thread
        torch.cuda.current_stream().synchronize()
        self._compile()
        base = cuda_driver.open_handle(address.handle)
        event = torch.cuda.Event.from_ipc_handle(self.kv.device, address.event) if address.event else None
        return Mapped(address.handle, DeviceMemory(base + address.offset), event)

    def _compile(self) -> None:
        """Builds the kernel before the loop needs it."""
        if self._by_kernel:
            scratch = torch.empty((2, self.block_bytes), dtype=torch.uint8, device=self.kv.device)
            pair = torch.tensor([[0, 1]], dtype=torch.int32, device=self.kv.device)
            copy_blocks(scratch, scratch, pair, self.block_bytes)
            torch.cuda.current_stream().synchronize()

    def close(self, mapped: Mapped) -> None:
        torch.cuda.set_device(self.kv.device)
        torch.cuda.current_stream().synchronize()
        cuda_driver.close_handle(mapped.handle)

    def mark(self) -> torch.cuda.Event:
        queued: torch.cuda.Event = torch.cuda.current_stream(self.kv.device).record_event()
        return queued

    def copy(self, mapped: Mapped, ids: Ids, mark: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.device(self.kv.device), torch.cuda.stream(self._stream):
            for event in (mark, mapped.event):
                if event is not None:
                    self._stream.wait_event(event)
            for first in range(0, len(ids), SLOT_ROWS):
                self._launch(mapped.memory, ids[first : first + SLOT_ROWS])
            done = torch.cuda.Event()
            done.record(self._stream)
            return done

    def _launch(self, target: DeviceMemory, ids: Ids) -> None:
        if not self._by_kernel:
            for to, of in ids.tolist():
                start = target.address + to * self.block_bytes
                cuda_driver.copy_async(start, self.kv[of].data_ptr(), self.block_bytes, self._stream.cuda_stream)
            return
        slot = self._slots[self._turn % NUM_SLOTS]
        self._turn += 1
        slot.done.synchronize()  # long ago, unless 32 copies are under way
        slot.host[: len(ids)].numpy()[:] = ids
        on_device = slot.ids_B2[: len(ids)]
        on_device.copy_(slot.host[: len(ids)], non_blocking=True)
        copy_blocks(target, self.kv, on_device, self.block_bytes)
        slot.done.record(self._stream)
