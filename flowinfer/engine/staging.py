"""Gives the bytes of KV blocks to stores, and takes them back: the arena itself on a CPU, pinned host memory else.

Pinned memory is what a GPU copies at full speed beside its computing, and page-aligned as O_DIRECT wants it. Copies run
on a stream of their own, behind what was queued when they were asked for; two halves of the memory take turns, so that
one is copied while the store works on the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from flowinfer.engine.layout import KVLayout

STAGED_BYTES = 64 << 20  # of pinned memory, in two halves
Result = TypeVar("Result")
Blocks = Sequence[int]


class Staging:
    """Block memory of one engine. `mark` is for the worker's loop, the rest for background threads, one at a time."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout) -> None:
        self._kv, self._lock = kv, threading.Lock()
        self._is_direct = kv.device.type == "cpu"
        self._halves: list[torch.Tensor] = []
        self._per_half = max(1, STAGED_BYTES // 2 // layout.block_bytes)
        self._stream: torch.cuda.Stream | None = None

    def mark(self) -> Any:
        """What the device has been told to do by now; copies of blocks wait for it."""
        return None if self._is_direct else torch.cuda.current_stream(self._kv.device).record_event()

    def write(
        self, blocks: Blocks, mark: Any, store: Callable[[int, Sequence[memoryview]], list[Result]]
    ) -> list[Result]:
        """store(first, memory) for runs of blocks, `first` being the place of the run; all that it returned.

        The memory stays as it is until store returns.
        """
        if self._is_direct:
            return store(0, [_bytes(self._kv[block]) for block in blocks])
        done: list[Result] = []
        with self._copying(mark) as stream:
            for at in range(0, len(blocks), self._per_half):
                some = blocks[at : at + self._per_half]
                half = self._halves[0]
                with torch.cuda.stream(stream):
                    for place, block in enumerate(some):
                        half[place].copy_(self._kv[block], non_blocking=True)
                stream.synchronize()
                done += store(at, [_bytes(half[place]) for place in range(len(some))])
        return done

    def read(self, blocks: Blocks, mark: Any, load: Callable[[int, Sequence[memoryview]], int]) -> int:
        """load(first, memory) for runs of blocks fills memory and returns how many leading ones it filled.

        Returns how many leading blocks are in place. What is loaded into one half goes to the device while the other
        one is loaded.
        """
        if self._is_direct:
            return load(0, [_bytes(self._kv[block]) for block in blocks])
        done = 0
        with self._copying(mark) as stream:
            copied: list[torch.cuda.Event | None] = [None, None]
            for turn, at in enumerate(range(0, len(blocks), self._per_half)):
                some, side = blocks[at : at + self._per_half], turn % 2
                if (event := copied[side]) is not None:
                    event.synchronize()
                num = load(at, [_bytes(self._halves[side][place]) for place in range(len(some))])
                with torch.cuda.stream(stream):
                    for place, block in enumerate(some[:num]):
                        self._kv[block].copy_(self._halves[side][place], non_blocking=True)
                    copied[side] = stream.record_event()
                done += num
                if num < len(some):
                    break
            stream.synchronize()
        return done

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


def _bytes(block: torch.Tensor) -> memoryview:
    """The bytes of a contiguous block in host memory."""
    memory: memoryview = block.view(torch.uint8).flatten().numpy().data
    return memory
