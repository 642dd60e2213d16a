"""Copies of many blocks of one engine's KV, or of a part of each: one launch on a card whose kernel does it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowinfer.kernels import arch
from flowinfer.message import Ids

PACKED_BYTES = 1 << 20  # of a block: below it packing wins on an H200 (16 KB 2x, 64 KB 2.8x, 240 KB 2.2x, 960 KB 1.07x)


class BlockCopies:
    """Of `kv` [blocks, ...], contiguous. A `part` is a slice of the elements of each block."""

    def __init__(self, kv: Tensor) -> None:
        self._kv, self._size = kv.view(len(kv), -1), kv[0].numel() * kv.element_size()
        dtype = str(kv.dtype).removeprefix("torch.")
        self._has_kernel = self._size % 16 == 0 and arch.supported("copy_blocks", str(kv.device), dtype)

    def packs(self, part: slice) -> bool:
        """Whether this part is small enough for its copies to be packed on the card, by a kernel that runs there."""
        first, size = (n * self._kv.element_size() for n in (part.start, part.stop - part.start))
        return self._has_kernel and size < PACKED_BYTES and first % 16 == 0 and size % 16 == 0

    def fetch(self, blocks: Ids, part: slice, rows: Tensor, room: Tensor | None = None) -> None:
        """rows[i] = this part of kv[blocks[i]], on the current stream; rows [blocks, part] pinned, or of a CPU.

        room: where the card may pack them, as large as rows.
        """
        if self.packs(part):
            packed = torch.empty_like(rows, device=self._kv.device) if room is None else room
            self._move(blocks, part, packed, inward=False)
            rows.copy_(packed, non_blocking=True)
        else:
            for row, block in zip(rows, blocks.tolist(), strict=True):
                row.copy_(self._kv[block, part], non_blocking=True)

    def put(self, blocks: Ids, part: slice, rows: Tensor, room: Tensor | None = None) -> None:
        """This part of kv[blocks[i]] = rows[i], as in fetch."""
        if self.packs(part):
            packed = torch.empty_like(rows, device=self._kv.device) if room is None else room
            packed.copy_(rows, non_blocking=True)
            self._move(blocks, part, packed, inward=True)
        else:
            for row, block in zip(rows, blocks.tolist(), strict=True):
                self._kv[block, part].copy_(row, non_blocking=True)

    def within(self, targets: Ids, sources: Ids) -> None:
        """kv[targets[i]] = kv[sources[i]], behind what is queued; no target is a source."""
        if not self._has_kernel:
            for to, of in zip(targets.tolist(), sources.tolist(), strict=True):
                self._kv[to].copy_(self._kv[of])
            return
        from flowinfer.kernels.copy_blocks import copy_blocks

        for pairs in self._pairs(targets, sources):
            copy_blocks(self._kv, self._kv, pairs, self._size)

    def _move(self, blocks: Ids, part: slice, packed: Tensor, *, inward: bool) -> None:
        from flowinfer.kernels.copy_blocks import DeviceMemory, copy_blocks

        item = self._kv.element_size()
        size, arena = (part.stop - part.start) * item, DeviceMemory(self._kv.data_ptr() + part.start * item)
        places = np.arange(len(blocks), dtype=np.int32)
        if inward:
            for pairs in self._pairs(blocks, places):
                copy_blocks(arena, packed, pairs, size, steps=(self._size, size))
        else:
            for pairs in self._pairs(places, blocks):
                copy_blocks(packed, arena, pairs, size, steps=(size, self._size))

    def _pairs(self, targets: Ids, sources: Ids) -> list[Tensor]:
        """int32 [n, 2] on the device, as many as a launch takes each. Doesn't wait."""
        from flowinfer.kernels.copy_blocks import MOST_BLOCKS

        pairs = torch.from_numpy(np.stack([targets, sources], 1).astype(np.int32))
        sent = (pairs.pin_memory() if self._kv.device.type == "cuda" else pairs).to(self._kv.device, non_blocking=True)
        return list(sent.split(MOST_BLOCKS))
