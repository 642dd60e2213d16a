"""Whole blocks of one arena into another, in any order, by one launch: a copy for each would mostly wait for its own.

Either arena may be memory of another process that is mapped here (CUDA IPC), which is no torch tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.copy_blocks.reference import copy_blocks_reference

__all__ = ["DeviceMemory", "copy_blocks", "copy_blocks_reference"]

MOST_BLOCKS = 65_535  # of a launch: the second dimension of a CUDA grid
ALIGNED = 16  # bytes that a thread moves at once


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that a kernel can reach and torch doesn't know. Triton takes it for a tensor of words."""

    address: int
    dtype: torch.dtype = torch.int32

    def data_ptr(self) -> int:
        """Its address, as a tensor's."""
        return self.address


def copy_blocks(
    target: Tensor | DeviceMemory,
    source: Tensor | DeviceMemory,
    ids_B2: Tensor,
    block_bytes: int,
    *,
    steps: tuple[int, int] | None = None,
    tile: int = 0,
    warps: int = 0,
) -> None:
    """target[ids[b, 0]] = source[ids[b, 1]] for each row b of ids, int32 [B, 2] on the device that copies.

    target, source: contiguous arenas of blocks of block_bytes, a multiple of 16; what is written isn't read.
    steps: bytes from one block of the target to the next, and of the source, where only a part of each is copied.
    tile: 4-byte words of a program, warps: of one; 0: as measured best.  Raises KernelUnsupported for what it can't.
    """
    from flowinfer.kernels.copy_blocks.triton import launch

    to_step, of_step = steps or (block_bytes, block_bytes)
    if any(size % ALIGNED for size in (block_bytes, to_step, of_step, target.data_ptr(), source.data_ptr())):
        raise KernelUnsupported(
            f"copy_blocks takes aligned blocks of a multiple of {ALIGNED} bytes, not {block_bytes}."
        )
    if ids_B2.dtype != torch.int32 or not ids_B2.is_contiguous() or len(ids_B2) > MOST_BLOCKS:
        raise KernelUnsupported(
            f"copy_blocks takes up to {MOST_BLOCKS} rows of int32, not {ids_B2.dtype} {len(ids_B2)}."
        )
    if len(ids_B2):
        words = block_bytes // 4, to_step // 4, of_step // 4
        launch(_words(target), _words(source), ids_B2, words, tile, warps)


def _words(arena: Tensor | DeviceMemory) -> Tensor | DeviceMemory:
    if isinstance(arena, DeviceMemory):
        return arena
    if not arena.is_contiguous():
        raise KernelUnsupported("copy_blocks takes contiguous arenas.")
    return arena.view(-1).view(torch.int32)
