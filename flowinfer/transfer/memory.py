"""The blocks of a pool as bytes: on a CPU the memory itself, on a GPU by copies through pinned memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowinfer.engine.block_copies import BlockCopies

Bytes = NDArray[np.uint8]


@dataclass
class Fetching:
    """Blocks on their way to the host. rows uint8 [blocks, bytes] are theirs once `done.query()` says so."""

    rows: Bytes
    done: Any


class PoolMemory:
    """Of an engine's `kv`, [blocks, ...] and contiguous. on_host: whether `read` costs nothing."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        # Made once: the way from a tensor's row to an array takes 36 us, as long as copying half a MB.
        self.on_host = kv.device.type == "cpu"
        self._rows: Bytes | None = kv.view(torch.uint8).view(len(kv), -1).numpy() if self.on_host else None
        self._copies = BlockCopies(kv)
        self._stream: torch.cuda.Stream | None = None

    def read(self, block: int) -> Bytes:
        """The bytes of a block; on a CPU not a copy."""
        if self._rows is not None:
            row: Bytes = self._rows[block]
            return row
        data: Bytes = self._kv[block].view(torch.uint8).flatten().cpu().numpy()
        return data

    def fetch(self, blocks: Sequence[int]) -> Fetching:
        """Starts to bring blocks of a GPU to the host, behind what is queued there. Doesn't wait."""
        kv = self._kv.view(len(self._kv), -1)
        with torch.cuda.device(kv.device), torch.inference_mode():
            if self._stream is None:
                self._stream = torch.cuda.Stream(kv.device)
            queued = torch.cuda.current_stream(kv.device).record_event()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(queued)
                rows = torch.empty((len(blocks), kv.shape[1]), dtype=kv.dtype, pin_memory=True)
                self._copies.fetch(np.array(blocks, np.int32), slice(0, kv.shape[1]), rows)
                return Fetching(rows.view(torch.uint8).numpy(), self._stream.record_event())

    def write(self, block: int, data: Bytes) -> None:
        """Fills a block with as many bytes as it has, by one copy; on a GPU behind what is queued, without a wait."""
        if self._rows is not None:
            self._rows[block] = data
            return
        pinned = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)  # torch keeps it until the copy is done
        pinned.numpy()[:] = data
        self._kv[block].view(torch.uint8).flatten().copy_(pinned, non_blocking=True)
