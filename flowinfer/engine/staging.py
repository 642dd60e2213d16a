"""Gives the bytes of KV blocks to stores, and takes them back: the arena itself on a CPU, pinned host memory else.

Pinned memory is what a GPU copies at full speed beside its computing, and page-aligned as O_DIRECT wants it. Copies run
on streams of their own, behind what was queued when they were asked for; two halves of the memory take turns, so that
one is copied while the store works on the other. Where what is copied of a block is small, the card packs it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from flowinfer.engine.block_copies import BlockCopies
from flowinfer.engine.layout import KVLayout

STAGED_BYTES = 64 << 20  # of pinned memory for each direction, in two halves
Result = TypeVar("Result")
Blocks = Sequence[int]
Store = Callable[[int, Sequence[memoryview]], list[Result]]
Load = Callable[[int, Sequence[memoryview]], int]


class Staging:
    """Block memory of one engine. `mark` is for the worker's loop, the rest for background threads."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout) -> None:
        self._kv, self._parts = kv.view(len(kv), -1), layout.parts
        self._is_direct = kv.device.type == "cpu"
        per_half = max(1, STAGED_BYTES // 2 // layout.block_bytes)
        self._out, self._in = _Lane(self._kv, per_half), _Lane(self._kv, per_half)

    def mark(self) -> Any:
        """What the device has been told to do by now; copies of blocks wait for it."""
        return None if self._is_direct else torch.cuda.current_stream(self._kv.device).record_event()

    def write(self, blocks: Blocks, mark: Any, store: Store[Result], part: str = "entries") -> list[Result]:
        """store(first, memory) for runs of blocks, `first` being the place of the run; all that it returned.

        memory: of this part of each block (KVLayout.parts). It stays as it is until store returns.
        """
        if self._is_direct:
            return store(0, [_bytes(self._kv[block, self._parts[part]]) for block in blocks])
        return self._out.write(blocks, mark, store, self._parts[part])

    def read(self, blocks: Blocks, mark: Any, load: Load, part: str = "entries") -> int:
        """load(first, memory) for runs of blocks fills memory and returns how many leading ones it filled.

        Returns how many leading blocks have this part in place.
        """
        if self._is_direct:
            return load(0, [_bytes(self._kv[block, self._parts[part]]) for block in blocks])
        return self._in.read(blocks, mark, load, self._parts[part])


class _Lane:
    """Copies in one direction, for one caller at a time. kv [blocks, elements]; part: which elements of each block."""

    def __init__(self, kv: torch.Tensor, per_half: int) -> None:
        self._kv, self._per_half = kv, per_half
        self._copies = BlockCopies(kv)
        self._lock = threading.Lock()
        self._halves: list[torch.Tensor] = []
        self._packed: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def write(self, blocks: Blocks, mark: Any, store: Store[Result], part: slice) -> list[Result]:
        """The next run is copied while the store works on this one."""
        runs = self._runs(blocks)
        done: list[Result] = []
        with self._copying(mark) as stream:
            copied = self._fetch(runs[0][1], 0, stream, part) if runs else None
            for turn, (at, some) in enumerate(runs):
                if copied is not None:
                    copied.synchronize()
                if turn + 1 < len(runs):
                    copied = self._fetch(runs[turn + 1][1], (turn + 1) % 2, stream, part)
                done += store(at, self._memory(turn % 2, len(some), part))
        return done

    def read(self, blocks: Blocks, mark: Any, load: Load, part: slice) -> int:
        """What is loaded into one half goes to the device while the other one is loaded."""
        done = 0
        with self._copying(mark) as stream:
            copied: list[torch.cuda.Event | None] = [None, None]
            for turn, (at, some) in enumerate(self._runs(blocks)):
                side = turn % 2
                if (event := copied[side]) is not None:
                    event.synchronize()
                num = load(at, self._memory(side, len(some), part))
                with torch.cuda.stream(stream):
                    rows, room = self._rows(side, num, part)
                    self._copies.put(np.array(some[:num], np.int32), part, rows, room)
                    copied[side] = stream.record_event()
                done += num
                if num < len(some):
                    break
            stream.synchronize()
        return done

    def _fetch(self, blocks: Blocks, side: int, stream: torch.cuda.Stream, part: slice) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            rows, room = self._rows(side, len(blocks), part)
            self._copies.fetch(np.array(blocks, np.int32), part, rows, room)
            copied: torch.cuda.Event = stream.record_event()
            return copied

    def _memory(self, side: int, count: int, part: slice) -> list[memoryview]:
        return [_bytes(row) for row in self._rows(side, count, part)[0]]

    def _rows(self, side: int, count: int, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This part of so many blocks, one behind the other: in a half, and on the card where they are packed first."""
        size = part.stop - part.start
        if not self._copies.packs(part):
            return _first(self._halves[side], count, size), None
        if not self._packed:
            self._packed = [torch.empty_like(half, device=self._kv.device) for half in self._halves]
        return _first(self._halves[side], count, size), _first(self._packed[side], count, size)

    def _runs(self, blocks: Blocks) -> list[tuple[int, Blocks]]:
        return [(at, blocks[at : at + self._per_half]) for at in range(0, len(blocks), self._per_half)]

    @contextmanager
    def _copying(self, mark: Any) -> Iterator[torch.cuda.Stream]:
        with self._lock, torch.inference_mode(), torch.cuda.device(self._kv.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._kv.device)
                shape = (self._per_half, *self._kv.shape[1:])
                self._halves = [torch.empty(shape, dtype=self._kv.dtype, pin_memory=True) for _ in range(2)]
            if mark is not None:
                self._stream.wait_event(mark)
            yield self._stream


def _first(memory: torch.Tensor, count: int, size: int) -> torch.Tensor:
    return memory.view(-1)[: count * size].view(count, size)


def _bytes(block: torch.Tensor) -> memoryview:
    """The bytes of a contiguous part of a block in host memory."""
    memory: memoryview = block.view(torch.uint8).flatten().numpy().data
    return memory
