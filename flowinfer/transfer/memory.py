"""The blocks of a pool as bytes: on a CPU the memory itself, on a GPU by copies through the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class PoolMemory:
    """Of an engine's `kv`, [blocks, ...] and contiguous."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        # Made once: the way from a tensor's row to an array takes 36 us, as long as copying half a MB.
        on_host = kv.device.type == "cpu"
        self._rows: NDArray[np.uint8] | None = kv.view(torch.uint8).view(len(kv), -1).numpy() if on_host else None

    def read(self, block: int) -> NDArray[np.uint8]:
        """The bytes of a block; on a CPU not a copy."""
        if self._rows is not None:
            row: NDArray[np.uint8] = self._rows[block]
            return row
        data: NDArray[np.uint8] = self._kv[block].view(torch.uint8).flatten().cpu().numpy()
        return data

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fills a block with as many bytes as it has, by one copy."""
        if self._rows is not None:
            self._rows[block] = data
        else:
            self._kv[block].view(torch.uint8).flatten().copy_(torch.from_numpy(data.copy()))
