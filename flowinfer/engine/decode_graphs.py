"""Decode steps as CUDA graphs over device-side batch state; the host starts one and looks at its tokens later.

State lies by slot on the device: last token, length, block table. A step reads it, and the sampling graph moves it on,
so the next step can start before the host has seen a token of this one. The host sends only what changed: who takes
part, sequences that joined or went on elsewhere (all of their state), and blocks that were added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.draw import SlotSettings, advance_drawn
from flowinfer.kernels.greedy import advance_greedy, greedy_scratch
from flowinfer.message import Ids

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.expert_load import ExpertLoad
    from flowinfer.engine.models.fused import FusedModel

FINE, COARSE = 16, 32  # steps between batch sizes up to 128 rows, and above


@dataclass(frozen=True)
class Flight:
    """A step on its way. Its tokens are valid once `tokens()` has returned."""

    slots: Ids
    versions: NDArray[np.int64]
    chosen: Tensor
    done: torch.cuda.Event

    def tokens(self) -> Ids:
        """The token of each row, -1 where its logits weren't finite. Waits for the step."""
        self.done.synchronize()
        chosen: Ids = self.chosen.numpy()[: len(self.slots)].copy()
        return chosen


@dataclass
class _Graph:
    model: torch.cuda.CUDAGraph
    greedy: torch.cuda.CUDAGraph  # best tokens
    draw: torch.cuda.CUDAGraph  # by each slot's settings
    logits: Tensor
    counts: Tensor | None = None  # int32 [expert layers, experts] of rows


class DecodeGraphs:
    """The graphs of one model over one arena, and the state of up to max_slots sequences."""

    def __init__(self, model: FusedModel, kv: Tensor, batch: Batch) -> None:
        self._start(model, kv, batch)
        self._scratch = Scratch.make(self.sizes[-1], model.heads, model.device)
        self._greedy = greedy_scratch(self.sizes[-1], model.config.vocab_size, model.device)
        self._pool = torch.cuda.graph_pool_handle()

    def _start(self, model: FusedModel, kv: Tensor, batch: Batch) -> None:
        self.model, self.kv, self.batch = model, kv, batch
        device, slots = model.device, batch.max_slots
        self.sizes = batch_sizes(slots)
        self.last = torch.zeros(slots, dtype=torch.int32, device=device)
        self.lengths = torch.ones(slots, dtype=torch.int32, device=device)
        self.tables = torch.zeros(slots, batch.blocks.shape[1], dtype=torch.int32, device=device)
        self._settings = SlotSettings.make(slots, device)
        self._slots = torch.full((self.sizes[-1],), -1, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(self.sizes[-1], dtype=torch.int32, device=device)
        self._ready = [_pinned(self.sizes[-1], device) for _ in range(4)]
        self._turn = 0
        self._staging = _Staging(8 * slots * (batch.blocks.shape[1] + 9), device)
        self._sent: Ids = np.empty(0, np.int32)  # the rows that _slots holds
        self._size = 0
        self._synced = np.full(slots, -1, np.int64)  # version whose last token and length the device has
        self._num_blocks = np.zeros(slots, np.int32)  # entries of each block table that it has
        self._graphs: dict[int, _Graph] = {}
        self.load: ExpertLoad | None = None  # where the rows of each expert are booked, a step or two late
        self._loads: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures all batch sizes, the largest first: the others reuse its memory."""
        for done, size in enumerate(reversed(self.sizes)):
            self._graphs[size] = self._capture(size)
            if progress:
                progress(done + 1, len(self.sizes))
        torch.cuda.synchronize()

    def _event(self) -> torch.cuda.Event:
        done = torch.cuda.Event()
        done.record()
        return done

    def forget(self, slots: Ids) -> None:
        """What these sequences have become is the host's business: their state is sent again before they next run."""
        self._synced[slots] = -1

    @torch.inference_mode()
    def launch(self, slots: Ids) -> Flight:
        """Starts a step over these slots: each runs its last token and gets its next one. Doesn't wait."""
        graph = self._prepare(slots)
        graph.model.replay()
        self._send_load(graph)
        (graph.draw if self.batch.choices[0][slots].any() else graph.greedy).replay()
        ready = self._ready[self._turn % len(self._ready)]
        self._turn += 1
        ready[: len(slots)].copy_(self._chosen[: len(slots)], non_blocking=True)
        return Flight(slots, self.batch.version[slots].copy(), ready, self._event())

    @torch.inference_mode()
    def logits(self, slots: Ids) -> Tensor:
        """Float32 logits [n, V] of the next token of each slot; the state stays as it is, and is sent again later."""
        self.forget(slots)
        graph = self._prepare(slots)
        graph.model.replay()
        self._send_load(graph)
        self.forget(slots)
        return graph.logits[: len(slots)].float()

    def experts_touched(self) -> list[int]:
        """Distinct experts that the last step used, by expert layer; empty for a dense model."""
        counts = self._graphs[self._size].counts
        touched: list[int] = [] if counts is None else (counts > 0).sum(1).tolist()
        return touched

    def _send_load(self, graph: _Graph) -> None:
        """Starts the way of this step's expert rows to the host, and books those that have arrived. Doesn't wait."""
        if graph.counts is None or self.load is None:
            return
        while self._loads and self._loads[0][1].query():
            self.load.windows["decode"].add(self._loads.popleft()[0].numpy())
        sent = torch.empty(graph.counts.shape, dtype=torch.int32, pin_memory=True)  # of torch's cache of pinned memory
        sent.copy_(graph.counts, non_blocking=True)
        self._loads.append((sent, self._event()))

    # ------------------------------------------------------------------------------------------------- state by slot

    def _prepare(self, slots: Ids) -> _Graph:
        size = next(size for size in self.sizes if size >= len(slots))
        if size != self._size or not np.array_equal(slots, self._sent):
            rows = np.full(size, -1, np.int32)
            rows[: len(slots)] = slots
            self._slots[:size].copy_(self._staging.send(rows), non_blocking=True)
            self._sent, self._size = slots.copy(), size
        batch = self.batch
        stale = slots[self._synced[slots] != batch.version[slots]]
        if stale.size:
            self._send_state(stale)
        grown = slots[self._num_blocks[slots] != batch.num_blocks[slots]]
        if grown.size:
            self._send_blocks(grown)
        return self._graphs[size]

    def _send_state(self, slots: Ids) -> None:
        batch = self.batch
        lengths = batch.num_tokens[slots]
        last = batch.tokens[slots, lengths - 1]
        width = int(batch.num_blocks[slots].max())
        choices = [np.ascontiguousarray(column[slots]).view(np.int32) for column in batch.choices]
        packed = np.concatenate([slots, last, lengths, *choices, batch.blocks[slots, :width].ravel()]).astype(np.int32)
        sent = self._staging.send(packed)
        n = len(slots)
        rows, last_, lengths_, *bits = sent[: 9 * n].split([n] * 7 + [2 * n])
        rows = rows.long()
        self.last[rows], self.lengths[rows] = last_, lengths_
        for column, values in zip(self._settings, bits, strict=True):
            column[rows] = values.clone().view(column.dtype)  # a copy is aligned
        self.tables[rows, :width] = sent[9 * n :].view(n, width)
        self._synced[slots] = batch.version[slots]
        self._num_blocks[slots] = batch.num_blocks[slots]

    def _send_blocks(self, slots: Ids) -> None:
        batch = self.batch
        known, have = self._num_blocks[slots], batch.num_blocks[slots]
        counts = np.maximum(have - known, 0)
        owners = np.repeat(slots, counts)
        columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - known, counts)
        packed = np.concatenate([owners, columns, batch.blocks[owners, columns]]).astype(np.int32)
        sent = self._staging.send(packed).view(3, -1)
        self.tables[sent[0].long(), sent[1].long()] = sent[2]
        self._num_blocks[slots] = have

    # ------------------------------------------------------------------------------------------------------ capturing

    @torch.inference_mode()
    def _capture(self, size: int) -> _Graph:
        batch = DecodeBatch(self._slots[:size], self.lengths, self.tables)
        self._slots.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and makes cuBLAS ready, which a capture can't
            logits = self.model.decode(self.last, batch, self.kv, self._scratch)
            self._advance_greedy(logits, size)
            self._advance_drawn(logits, size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        chosen: list[Tensor] = []
        model, greedy, draw = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(model, pool=self._pool):
            logits = self.model.decode(self.last, batch, self.kv, self._scratch, chosen)
            counts = count_rows(torch.stack(chosen), batch.slots, self.model.config.num_experts) if chosen else None
        with torch.cuda.graph(greedy, pool=self._pool):
            self._advance_greedy(logits, size)
        with torch.cuda.graph(draw, pool=self._pool):
            self._advance_drawn(logits, size)
        self._sent = np.empty(0, np.int32)
        return _Graph(model, greedy, draw, logits, counts)

    def _advance_drawn(self, logits: Tensor, size: int) -> None:
        advance_drawn(logits, self._slots[:size], self.last, self.lengths, self._chosen[:size], self._settings)

    def _advance_greedy(self, logits: Tensor, size: int) -> None:
        advance_greedy(logits, self._slots[:size], self.last, self.lengths, self._chosen[:size], self._greedy)


def count_rows(ids_LBK: Tensor, slots_B: Tensor, num_experts: int) -> Tensor:
    """int32 [L, E]: rows of each expert by layer; rows without a slot are padding. The host needn't know any of it."""
    layers, _, top = ids_LBK.shape
    first = torch.arange(layers, dtype=torch.int32, device=ids_LBK.device).view(-1, 1, 1) * num_experts
    real = (slots_B >= 0).int().view(1, -1, 1).expand(layers, -1, top)
    counts = torch.zeros(layers * num_experts, dtype=torch.int32, device=ids_LBK.device)
    return counts.index_add_(0, (ids_LBK + first).flatten(), real.flatten()).view(layers, num_experts)


class _Staging:
    """A ring of pinned memory: what is copied from it must have arrived before the ring comes round again.

    It holds eight times the most that a step sends, and the host is never more than two steps ahead.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = _pinned(max(size, 1024), device)
        self._view = self._pinned.numpy()
        self._device = device
        self._at = 0

    def send(self, values: Ids) -> Tensor:
        """The values on the device, without waiting."""
        end = self._at + len(values)
        if end > len(self._view):
            self._at, end = 0, len(values)
        self._view[self._at : end] = values
        sent = self._pinned[self._at : end].to(self._device, non_blocking=True)
        self._at = end
        return sent


def _pinned(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: padding wastes little, and capturing takes a second in all."""
    sizes = [1, 2, 4, FINE // 2, *range(FINE, min(most, 128) + 1, FINE), *range(128 + COARSE, most + 1, COARSE)]
    sizes = [size for size in sizes if size < most]
    return [*sizes, most]
