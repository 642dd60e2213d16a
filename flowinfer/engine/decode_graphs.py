"""Decode steps as CUDA graphs over device-side batch state; the host starts one and looks at its tokens later.

State lies by slot on the device: last token, length, block table. A step reads it, and the end of its graph moves it
on, so the next step can start before the host has seen a token of this one. The host sends only what changed: who takes
part, sequences that joined or went on elsewhere (all of their state), and blocks that were added. Steps with drafts
share the state: verify_graphs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowinfer.engine.draft_plan import DraftPlan
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.draw import SlotSettings, advance_drawn, draw_scratch
from flowinfer.kernels.greedy import advance_greedy, greedy_scratch
from flowinfer.message import Ids

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.expert_load import ExpertLoad, LoadWindow
    from flowinfer.engine.models.deepseek_v4.fused import FusedV4
    from flowinfer.engine.models.fused import FusedModel
    from flowinfer.engine.verify_graphs import VerifyGraphs

FINE, COARSE = 16, 32  # steps between batch sizes up to 128 rows, and above
IN_FLIGHT = 4  # buffers for what steps give: more than are ever on their way
BOOKED = (
    8  # steps whose rows by expert go to the host together: a copy, an event and sums a step cost more than all else
)


class Event(Protocol):
    """Of the device's stream."""

    def synchronize(self) -> None:
        """Waits for it."""

    def query(self) -> bool:
        """Whether it has come."""


class Replay(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Starts it."""


@dataclass(frozen=True)
class Flight:
    """A step on its way. Its tokens are valid once `tokens()` has returned.

    num_changes: of the batch when it was started.
    rows: 0, or of a step that verifies drafts, how many each sequence had; then `chosen` is kernels.verify's verdict.
    most int32 [n]: tokens that it gives each sequence at most; None: one.
    """

    slots: Ids
    versions: NDArray[np.int64]
    chosen: Tensor
    done: Event
    num_changes: int = -1
    rows: int = 0
    most: Ids | None = None

    def tokens(self) -> Ids:
        """The token of each row, -1 where its logits weren't finite; or the verdict [n, W]. Waits for the step."""
        self.done.synchronize()
        chosen: Ids = self.chosen.numpy()[: len(self.slots)].copy()
        return chosen


class Judged(NamedTuple):
    """A step that was waited for. chosen int32 [R]: the target's token of each row; else logits float32 [R, V].

    features [R, layers * H], where the plan has any.
    """

    chosen: Ids | None
    logits: Tensor | None
    features: Tensor | None
    seconds: float


@dataclass(frozen=True)
class Captured:
    """A captured step. counts: where it leaves its rows by expert, int32 [expert layers, experts]; or nothing."""

    graph: Replay
    counts: list[Tensor]


@dataclass(frozen=True)
class Steps:
    """The captured steps of one size, that end in the best tokens or in drawn ones."""

    greedy: Captured
    drawn: Captured


class DecodeGraphs:
    """The graphs of one model over one arena, and the state of up to max_slots sequences."""

    def __init__(self, model: FusedModel | FusedV4, kv: Tensor, batch: Batch) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._start(model, kv, batch)
        self.scratch = Scratch.make(self.sizes[-1], model.heads, model.device)
        self._greedy = greedy_scratch(self.sizes[-1], model.config.vocab_size, model.device)
        self._drawing = draw_scratch(self.sizes[-1], model.config.vocab_size, model.device)

    def _start(self, model: FusedModel | FusedV4, kv: Tensor, batch: Batch) -> None:
        self.model, self.kv, self.batch = model, kv, batch
        device, slots = model.device, batch.max_slots
        self.sizes = batch_sizes(slots)
        self.state = torch.zeros(7, slots, dtype=torch.int32, device=device)
        self.last, self.lengths, self.limits = self.state[:3]
        self.lengths.fill_(1)
        heat, top_p, min_p = (self.state[row].view(torch.float32) for row in (3, 5, 6))
        self.settings = SlotSettings(
            heat, self.state[4], top_p, min_p, torch.zeros(slots, dtype=torch.int64, device=device)
        )  # fmt: skip
        self.tables = torch.zeros(slots, batch.blocks.shape[1], dtype=torch.int32, device=device)
        self.slots = torch.full((self.sizes[-1],), -1, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(self.sizes[-1], dtype=torch.int32, device=device)
        self._logits = torch.empty(self.sizes[-1], model.config.vocab_size, dtype=model.dtype, device=device)
        self._ready = Ring(self.sizes[-1], device)
        self.staging = Staging(8 * slots * (batch.blocks.shape[1] + 10), device)
        self._sent: Ids = np.empty(0, np.int32)  # the rows that `slots` holds
        self._size = 0
        self._is_drawn = False  # whether a token of those rows is
        self._settled = -1  # batch.num_changes at which the device has the state of all of them
        self._synced = np.full(slots, -1, np.int64)  # version whose last token and length the device has
        self._num_blocks = np.zeros(slots, np.int32)  # entries of each block table that it has
        self._graphs: dict[int, Steps] = {}
        self._counts: list[Tensor] = []  # of the last step
        self.plan = DraftPlan()
        self.verifying: VerifyGraphs | None = None  # steps with drafts, as `plan` has them
        self.load: ExpertLoad | None = None  # where the rows of each expert are booked, up to 2 * BOOKED steps late
        self._rows: ExpertRows | None = None

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures all batch sizes, the largest first: the others reuse its memory."""
        with self.nobody():
            for done, size in enumerate(reversed(self.sizes)):
                self._graphs[size] = self.steps(partial(self._step, size))
                if progress:
                    progress(done + 1, len(self.sizes))

    def follow(self, plan: DraftPlan) -> None:
        """Captures the steps with drafts that this plan has; those of the last one are gone. Nothing is in flight."""
        self.plan, self.verifying = plan, None
        self._synced[:] = self._settled = -1
        if plan.num_drafts:
            self.verifying = self._verifying_by(plan)
            self.verifying.capture()

    def _verifying_by(self, plan: DraftPlan) -> VerifyGraphs:
        from flowinfer.engine.verify_graphs import VerifyGraphs

        return VerifyGraphs(self, plan)

    def event(self) -> Event:
        """What comes once all that was started is done."""
        done = torch.cuda.Event()
        done.record()
        return done

    def forget(self, slots: Ids) -> None:
        """What these sequences have become is the host's business: their state is sent again before they next run."""
        self._synced[slots] = self._settled = -1

    def stale(self, slots: Ids) -> Ids:
        """Those of the slots whose state the device hasn't."""
        stale: Ids = slots[self._synced[slots] != self.batch.version[slots]]
        return stale

    def launch(self, slots: Ids) -> Flight:
        """Starts a step over these slots: each runs its last token and gets its next one. Doesn't wait."""
        size = self.prepare(slots)
        self.replay(self._graphs[size])
        ready = self._ready.take(self._chosen, size)
        return Flight(slots, self.batch.version[slots], ready, self.event(), self.batch.num_changes)

    @torch.inference_mode()
    def judge(self, slots: Ids, *, on_device: bool) -> Judged:
        """A step over these slots, one token each. on_device: it is waited for and gives tokens, and the state moves
        on; else logits that may still be on their way, and the state is sent again before these slots next run.
        """
        began = time.perf_counter()
        if self.verifying is not None:
            self.verifying.forget(slots)
        if on_device:
            return Judged(self.launch(slots).tokens(), None, None, time.perf_counter() - began)
        self.forget(slots)
        size = self.prepare(slots)
        self.replay(self._graphs[size], greedy=True)
        self.forget(slots)
        return Judged(None, self._logits[: len(slots)].float(), None, time.perf_counter() - began)

    def replay(self, steps: Steps, *, greedy: bool = False) -> None:
        """Starts a step over those that were prepared; its rows by expert are kept."""
        step = steps.drawn if self._is_drawn and not greedy else steps.greedy
        step.graph.replay()
        self._counts = step.counts
        if step.counts and self.load is not None:
            if self._rows is None:
                self._rows = ExpertRows(step.counts[0], self.load.windows["decode"])
            self._rows.keep(step.counts[0], self.event)

    def experts_touched(self) -> list[int]:
        """Distinct experts that the last step used, by expert layer; empty for a dense model."""
        touched: list[int] = (self._counts[0] > 0).sum(1).tolist() if self._counts else []
        return touched

    # ------------------------------------------------------------------------------------------------- state by slot

    def prepare(self, slots: Ids) -> int:
        """Makes the device's state that of these slots, and returns the size of graph that they need."""
        batch = self.batch
        if slots is not self._sent and not np.array_equal(slots, self._sent):
            size = next(size for size in self.sizes if size >= len(slots))
            rows = np.full(size, -1, np.int32)
            rows[: len(slots)] = slots
            self.staging.send(rows, self.slots[:size])
            self._size, self._settled = size, -1
        self._sent = slots
        if self._settled != batch.num_changes:
            stale = self.stale(slots)
            if stale.size:
                self._send_state(stale)
            self._is_drawn = bool(batch.choices[0][slots].any())
            self._settled = batch.num_changes
        grown = slots[self._num_blocks[slots] != batch.num_blocks[slots]]
        if grown.size:
            self._send_blocks(grown)
        return self._size

    def _send_state(self, slots: Ids) -> None:
        batch, n = self.batch, len(slots)
        lengths = batch.num_tokens[slots]
        width = int(batch.num_blocks[slots].max())
        heat, top_k, top_p, min_p, seeds = (np.ascontiguousarray(column[slots]) for column in batch.choices)
        settings = (heat.view(np.int32), top_k, top_p.view(np.int32), min_p.view(np.int32))
        columns = (batch.tokens[slots, lengths - 1], lengths, batch.limit[slots], *settings)
        packed = np.concatenate([seeds.view(np.int32), slots, *columns, batch.blocks[slots, :width].ravel()])
        sent = self.staging.send(packed)
        rows = sent[2 * n : 3 * n].long()
        self.settings.seeds[rows] = sent[: 2 * n].view(torch.int64)
        self.state[:, rows] = sent[3 * n : 10 * n].view(7, n)
        self.tables[rows, :width] = sent[10 * n :].view(n, width)
        self._synced[slots] = batch.version[slots]
        self._num_blocks[slots] = batch.num_blocks[slots]

    def _send_blocks(self, slots: Ids) -> None:
        batch = self.batch
        known, have = self._num_blocks[slots], batch.num_blocks[slots]
        counts = np.maximum(have - known, 0)
        owners = np.repeat(slots, counts)
        columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - known, counts)
        packed = np.concatenate([owners, columns, batch.blocks[owners, columns]]).astype(np.int32)
        sent = self.staging.send(packed).view(3, -1)
        self.tables[sent[0].long(), sent[1].long()] = sent[2]
        self._num_blocks[slots] = have

    # ------------------------------------------------------------------------------------------------------ capturing

    def steps(self, step: Callable[[bool], list[Tensor]]) -> Steps:
        """Both endings of a step, which is told whether tokens are drawn and returns where its rows by expert are."""
        ends = []
        for drawn in (False, True):
            counts: list[Tensor] = []

            def run(drawn: bool = drawn, counts: list[Tensor] = counts) -> None:
                counts[:] = step(drawn)

            ends.append(Captured(self.captured(run), counts))
        return Steps(*ends)

    def captured(self, run: Callable[[], None]) -> Replay:
        """The graph of what `run` starts. It runs once before, which compiles kernels and makes cuBLAS ready."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self.pool):
            run()
        return graph

    def nobody(self) -> Nobody:
        """While graphs are captured: steps run over padding alone and change nothing."""
        return Nobody(self)

    def _step(self, size: int, drawn: bool) -> list[Tensor]:
        slots = self.slots[:size]
        experts: list[Tensor] = []
        batch = DecodeBatch(slots, self.lengths, self.tables)
        logits = self.model.decode(self.last, batch, self.kv, self.scratch, experts, self._logits[:size])
        counts = self.rows_by_expert(experts, slots)
        if drawn:
            advance_drawn(
                logits, slots, self.last, self.lengths, self._chosen[:size], self.settings, self._drawing
            )  # fmt: skip
        else:
            advance_greedy(logits, slots, self.last, self.lengths, self._chosen[:size], self._greedy)
        return counts

    def rows_by_expert(self, chosen: list[Tensor], rows: Tensor) -> list[Tensor]:
        """What `Captured.counts` wants of a step's choices, in whose rows -1 marks padding."""
        return [count_rows(torch.stack(chosen), rows, self.model.config.num_experts)] if chosen else []


class Nobody:
    """Takes everybody out of a step; the next one is told again who takes part."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs

    def __enter__(self) -> None:
        self._graphs.slots.fill_(-1)

    def __exit__(self, *_: object) -> None:
        self._graphs._sent, self._graphs._settled = np.empty(0, np.int32), -1


def count_rows(ids_LBK: Tensor, slots_B: Tensor, num_experts: int) -> Tensor:
    """int32 [L, E]: rows of each expert by layer; rows without a slot are padding. The host needn't know any of it."""
    layers, _, top = ids_LBK.shape
    first = torch.arange(layers, dtype=torch.int32, device=ids_LBK.device).view(-1, 1, 1) * num_experts
    real = (slots_B >= 0).int().view(1, -1, 1).expand(layers, -1, top)
    counts = torch.zeros(layers * num_experts, dtype=torch.int32, device=ids_LBK.device)
    return counts.index_add_(0, (ids_LBK + first).flatten(), real.flatten()).view(layers, num_experts)


class Ring:
    """Pinned buffers for what steps give, in turn; a view of each is made once for every size."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._buffers = [pinned(size, device) for _ in range(IN_FLIGHT)]
        self._views: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._turn = 0

    def take(self, given: Tensor, rows: int) -> Tensor:
        """Starts the way of given[:rows] to the host; it may be read once that has happened."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        shape = (rows, *given.shape[1:])
        view = self._views.get((self._turn, shape))
        if view is None:
            view = self._buffers[self._turn][: rows * given[:1].numel()].view(shape)
            self._views[self._turn, shape] = view
        return view.copy_(given[:rows] if rows < len(given) else given, non_blocking=True)


class ExpertRows:
    """Rows of each expert of steps that have run: on the device, until BOOKED steps go to the host and are booked."""

    def __init__(self, counts_LE: Tensor, window: LoadWindow) -> None:
        self._window = window
        self._kept = torch.zeros(BOOKED, *counts_LE.shape, dtype=torch.int32, device=counts_LE.device)
        self._places = list(self._kept)
        self._num = 0
        self._ring = Ring(self._kept.numel(), counts_LE.device)
        self._sent: deque[tuple[Tensor, Event]] = deque()

    def keep(self, counts_LE: Tensor, event: Callable[[], Event]) -> None:
        """Those of the step that was started last. Doesn't wait."""
        self._places[self._num].copy_(counts_LE, non_blocking=True)
        self._num += 1
        if self._sent and self._sent[0][1].query():
            self._window.add_all(self._sent.popleft()[0].numpy())
        if self._num == BOOKED:
            self._num = 0
            if len(self._sent) < IN_FLIGHT - 1:  # what isn't booked must not be written over
                self._sent.append((self._ring.take(self._kept, BOOKED), event()))


class Staging:
    """A ring of pinned memory: what is copied from it must have arrived before the ring comes round again.

    It holds eight times the most that a step sends, and the host is never more than two steps ahead.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = pinned(max(size, 1024), device)
        self._view = self._pinned.numpy()
        self._device = device
        self._at = 0

    def send(self, values: Ids, to: Tensor | None = None) -> Tensor:
        """The values on the device, in a new tensor where `to` doesn't take them. Doesn't wait."""
        at = self._at + self._at % 2  # int64 values may be among them
        end = at + len(values)
        if end > len(self._view):
            at, end = 0, len(values)
        self._view[at:end] = values
        self._at = end
        if to is not None:
            return to.copy_(self._pinned[at:end], non_blocking=True)
        return self._pinned[at:end].to(self._device, non_blocking=True)


def pinned(size: int, device: torch.device) -> Tensor:
    """int32 zeros that the device can copy from or to without the host's help."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: padding wastes little, and capturing takes a second in all."""
    sizes = [1, 2, 4, FINE // 2, *range(FINE, min(most, 128) + 1, FINE), *range(128 + COARSE, most + 1, COARSE)]
    sizes = [size for size in sizes if size < most]
    return [*sizes, most]
