"""Reads ranges of files into the memory of a card: several threads, each with pinned memory and a stream of its own.

A copy out of a mapping is pageable: the driver stages it in one thread. Here each thread brings what it reads from the
page cache into one half of its pinned memory, while the card fetches the other half.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowinfer.errors import ModelError

THREADS = 8  # at most
CHUNK = 4 << 20  # bytes of a half
MAPPED = False  # whether files are mapped, or read by system calls


class CardReader:
    """Reads that run beside each other. Used by one thread; its own are gone after `close`."""

    def __init__(self, device: torch.device, *, threads: int = 0, chunk: int = CHUNK) -> None:
        """threads 0: as many as there are cores, up to THREADS. A CPU for device works too, for tests."""
        self.device, self._chunk = device, chunk
        self._pool = ThreadPoolExecutor(threads or min(THREADS, os.cpu_count() or 1), "weights")
        self._mine = threading.local()
        self._lanes: list[_Lane] = []
        self._files: dict[Path, _File] = {}
        self._reads: list[Future[None]] = []

    def read(self, path: Path, offset: int, out: Tensor) -> None:
        """Starts to fill `out`, contiguous, with the bytes of the file at `offset`. They are there after `settle`."""
        if path not in self._files:
            self._files[path] = _File(path)
        data, file = out.view(-1).view(torch.uint8), self._files[path]
        queued = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        for at in range(0, len(data), self._chunk):
            part = data[at : at + self._chunk]
            self._reads.append(self._pool.submit(self._copy, file, offset + at, part, queued))

    def settle(self) -> None:
        """What is queued on the device from now on sees all that was read. Raises ModelError for a file too short."""
        reads, self._reads = self._reads, []
        for read in reads:
            read.result()
        for lane in self._lanes:
            lane.join()

    def close(self) -> None:
        """Waits for what is under way: nothing is written to memory that its owner has given up."""
        self._pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.drain()
        for file in self._files.values():
            file.close()
        self._files, self._lanes, self._reads = {}, [], []

    def _copy(self, file: _File, offset: int, out: Tensor, queued: Any) -> None:
        lane: _Lane | None = getattr(self._mine, "lane", None)
        if lane is None:
            lane = self._mine.lane = _Lane(self.device, self._chunk)
            self._lanes.append(lane)
        with torch.inference_mode():
            lane.copy(file, offset, out, queued)


class _Lane:
    """Of one thread: two halves of pinned memory, and the stream that empties them."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._on_card = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_card else None
        self._halves = [torch.empty(chunk, dtype=torch.uint8, pin_memory=self._on_card) for _ in range(2)]
        self._emptied: list[Any] = [None, None]
        self._turn = 0

    def copy(self, file: _File, offset: int, out: Tensor, queued: Any) -> None:
        side, self._turn = self._turn % 2, self._turn + 1
        if (event := self._emptied[side]) is not None:
            event.synchronize()
        half = self._halves[side][: len(out)]
        file.fill(offset, half.numpy())
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                self._stream.wait_event(queued)
            out.copy_(half, non_blocking=True)
            if self._stream is not None:
                self._emptied[side] = self._stream.record_event()

    def join(self) -> None:
        """Puts what comes next on the device's current stream behind these copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _File:
    """An open file, mapped or not. Any thread may fill memory from it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        self._bytes: NDArray[np.uint8] | None = None
        if MAPPED:
            self._bytes = np.frombuffer(mmap.mmap(self._file, 0, prot=mmap.PROT_READ), np.uint8)

    def fill(self, offset: int, memory: NDArray[np.uint8]) -> None:
        """Copies the bytes at offset. Raises ModelError where the file ends before."""
        if self._bytes is not None:
            found = self._bytes[offset : offset + len(memory)]
            if len(found) < len(memory):
                raise self._ends()
            np.copyto(memory, found)
            return
        rest = memory.data
        while len(rest):
            count = os.preadv(self._file, [rest], offset)
            if not count:
                raise self._ends()
            rest, offset = rest[count:], offset + count

    def _ends(self) -> ModelError:
        return ModelError(f"{self._path} can't be read: it ends too early.", help="Is the download complete?")

    def close(self) -> None:
        self._bytes = None  # which is what keeps the mapping
        os.close(self._file)
