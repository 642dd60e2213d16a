"""Decode steps with drafts as CUDA graphs: the model over all rows, every row's own token, and what held.

A step takes each slot's last token and its drafts, which the host has sent or the step before has looked up (n-grams),
chooses the target's own token for every row, and moves the state by slot on by the drafts that held and one token more.
Where it looks drafts up itself, the next step can start before the host has seen what this one gave: every sequence got
at least one token, and none goes beyond its end.

What a rejected draft wrote lies behind its sequence's end: the next step writes over it before anything reads there,
and blocks are named by tokens of the history alone.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowinfer.engine.decode_graphs import Flight, Judged, Ring, Steps
from flowinfer.engine.step import Features
from flowinfer.kernels.decode_attention import DecodeBatch
from flowinfer.kernels.draw import SlotSettings, advance_drawn, draw_scratch
from flowinfer.kernels.greedy import advance_greedy, greedy_scratch
from flowinfer.kernels.ngram import look_up, lookup_scratch
from flowinfer.kernels.verify import Drafted, Rows, Verdict, advance_verified, spread_rows, verdict_width
from flowinfer.message import Ids

if TYPE_CHECKING:
    from flowinfer.engine.decode_graphs import DecodeGraphs
    from flowinfer.engine.draft_plan import DraftPlan

MOST_ROWS = 512  # of a step with drafts: where that many sequences run, rows are no longer nearly free


class VerifyGraphs:
    """Steps of up to 1 + plan.num_drafts rows of each sequence, over the state by slot of `graphs`."""

    def __init__(self, graphs: DecodeGraphs, plan: DraftPlan) -> None:
        self.graphs, self.plan = graphs, plan
        self.rows = 1 + plan.num_drafts
        self.sizes = [size for size in graphs.sizes if size * self.rows <= MOST_ROWS]
        device, slots, drafts = graphs.state.device, graphs.batch.max_slots, plan.num_drafts
        self._sent = torch.zeros(slots * (drafts + 2), dtype=torch.int32, device=device)
        tokens, num, most = self._sent.split([slots * drafts, slots, slots])
        self.drafted = Drafted(tokens.view(slots, drafts), num, most, graphs.limits)
        most_sequences = graphs.sizes[-1] if plan.ngram else max(self.sizes, default=0)
        most_rows = max([size * self.rows for size in self.sizes] + [most_sequences])
        self._ids, self._space = (
            Rows.make(1, most_rows, device),
            torch.zeros(most_rows, dtype=torch.int32, device=device),
        )
        self._counts = torch.zeros(most_sequences, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._logits = torch.empty(most_rows, graphs.model.config.vocab_size, dtype=graphs.model.dtype, device=device)
        self._out = {rows: torch.zeros(most_sequences, verdict_width(rows, drafts), dtype=torch.int32, device=device)
                     for rows in (1, self.rows)}  # fmt: skip
        self._ready = Ring(most_sequences * verdict_width(self.rows, drafts), device)
        self.history: Tensor | None = None  # all tokens by slot and position, where drafts are looked up there
        if plan.ngram:
            self.history = torch.zeros(slots, graphs.batch.tokens.shape[1], dtype=torch.int32, device=device)
        self._known = np.full(slots, -1, np.int64)  # version whose history is there
        self._last: Ids | None = None  # the slots of which all histories are there, at this num_changes of the batch
        self._settled = -1
        self._most: Ids = np.zeros(slots, np.int32)  # what the device has of batch.most_drafts
        self._steps: dict[tuple[int, int], Steps] = {}
        width = len(plan.feature_layers) * graphs.model.config.hidden_size
        self._given = torch.empty(most_rows, width, dtype=graphs.model.dtype, device=device)
        self._make_scratch(most_sequences, most_rows)

    def _make_scratch(self, sequences: int, rows: int) -> None:
        model = self.graphs.model
        self._scratch = model.verify_scratch(max(self.sizes, default=1), self.rows)
        self._greedy = greedy_scratch(rows, model.config.vocab_size, model.device)
        self._drawing = draw_scratch(rows, model.config.vocab_size, model.device)
        self._lookup = lookup_scratch(sequences, model.device)

    def capture(self) -> None:
        """Captures all sizes, the largest first; also of steps without drafts, where those look some up."""
        with self.graphs.nobody():
            for rows, sizes in ((self.rows, self.sizes), (1, self.graphs.sizes if self.plan.ngram else [])):
                for size in reversed(sizes):
                    self._steps[size, rows] = self.graphs.steps(partial(self._step, size, rows))

    # ------------------------------------------------------------------------------------------------ ahead of the host

    def launch(self, slots: Ids) -> Flight:
        """Starts a step over what the one before has drafted, at most batch.most_drafts of each. Doesn't wait."""
        graphs, batch = self.graphs, self.graphs.batch
        most = batch.most_drafts
        rows = self.rows_for(slots)
        self._send_history(slots)
        size = graphs.prepare(slots)
        if not np.array_equal(most, self._most):
            self._most = most.copy()
            graphs.staging.send(most, self.drafted.most)
        graphs.replay(self._steps[size, rows])
        ready = self._ready.take(self._out[rows], size)
        gives = np.minimum(most[slots], self.plan.num_drafts) + 1 if rows > 1 else None
        return Flight(slots, batch.version[slots], ready, graphs.event(), batch.num_changes, rows, gives)

    def rows_for(self, slots: Ids) -> int:
        """Rows of each sequence in a step over these."""
        wanted = len(slots) <= max(self.sizes, default=0) and bool(self.graphs.batch.most_drafts[slots].any())
        return self.rows if wanted else 1

    def _send_history(self, slots: Ids) -> None:
        """Of slots whose state is sent again, or that ran without this; the device itself adds what steps give."""
        assert self.history is not None, "only steps that look drafts up run ahead with them"
        batch = self.graphs.batch
        if self._settled == batch.num_changes and slots is self._last:
            return
        forgotten = self.graphs.stale(slots)
        missing = np.union1d(forgotten, slots[self._known[slots] != batch.version[slots]])
        for slot in missing.tolist():
            tokens = torch.from_numpy(batch.history(slot))
            if self.history.is_cuda:
                tokens = tokens.pin_memory()  # torch keeps it until the copy has happened
            self.history[slot, : len(tokens)].copy_(tokens, non_blocking=True)
            self.drafted.num[slot] = 0
        self._known[missing] = batch.version[missing]
        self._settled, self._last = batch.num_changes, slots

    # ---------------------------------------------------------------------------------------------------- with the host

    def fits(self, counts: Ids) -> bool:
        """Whether a step of so many rows of each sequence is captured."""
        return len(counts) <= max(self.sizes, default=0) and int(counts.max()) <= self.rows

    @torch.inference_mode()
    def judge(self, slots: Ids, counts: Ids, tokens: Ids, *, on_device: bool) -> Judged:
        """Runs the last token of each slot and the drafts behind it, flat in `tokens`, and waits for the outcome.

        on_device: tokens are chosen there, by each slot's settings, and the state by slot moves on; else logits are
        given, and the state is sent again before these slots next run.
        """
        began = time.perf_counter()
        graphs = self.graphs
        real = np.arange(self.rows) < counts[:, None]
        drafts = np.zeros((len(slots), self.rows), np.int32)
        drafts[real] = tokens
        if not on_device:
            graphs.forget(slots)
        self.forget(slots)
        size = graphs.prepare(slots)
        self._send_drafts(slots, drafts[:, 1:], counts - 1)
        steps = self._steps[size, self.rows]
        graphs.replay(steps, greedy=not on_device)
        chosen: Ids | None = None
        logits = features = None
        if self.plan.feature_layers or not on_device:
            picked = graphs.staging.send(np.flatnonzero(real).astype(np.int32))
            features = self._given.index_select(0, picked) if self.plan.feature_layers else None
            logits = None if on_device else self._logits.index_select(0, picked).float()
        ready = self._ready.take(self._out[self.rows], size)
        graphs.event().synchronize()
        if on_device:
            chosen = ready.numpy()[: len(slots), 1 : 1 + self.rows][real]
        else:
            graphs.forget(slots)
        return Judged(chosen, logits, features, time.perf_counter() - began)

    def forget(self, slots: Ids) -> None:
        """These run without this class: their history is sent again before drafts are looked up in it."""
        self._known[slots] = self._settled = -1

    def _send_drafts(self, slots: Ids, drafts: Ids, num: Ids) -> None:
        packed = np.zeros((self.graphs.batch.max_slots, self.plan.num_drafts), np.int32)
        counts = np.zeros((2, len(packed)), np.int32)
        packed[slots], counts[:, slots] = drafts, num
        self._most = counts[1]
        self.graphs.staging.send(np.concatenate([packed.ravel(), counts.ravel()]), self._sent)

    # ------------------------------------------------------------------------------------------------------ the step

    def _step(self, size: int, each: int, drawn: bool) -> list[Tensor]:
        graphs, num = self.graphs, size * each
        slots, state, chosen = graphs.slots[:size], (graphs.last, graphs.lengths), self._chosen[:num]
        _, tokens, ids, lengths, settings = self._ids
        own = SlotSettings(*(column[:num] for column in settings))
        rows = Rows(self._counts[:size], tokens[:num], ids[:num], lengths[:num], own)
        self._spread(slots, *state, self.drafted, graphs.settings, rows)
        experts: list[Tensor] = []
        features = Features(self.plan.feature_layers) if self.plan.feature_layers and each > 1 else None
        logits = self._model(slots, rows, experts, features)
        if features is not None:
            self._given[:num].copy_(features.joined())
        counts = graphs.rows_by_expert(experts, rows.ids)
        choose = self._draw if drawn else self._best
        choose(logits, rows, chosen)
        self._advance(chosen, slots, rows, self.drafted, *state, self._out[each][:size], self.history)
        if self.plan.ngram and self.history is not None:
            self._look_up(slots, self.history, graphs.lengths, self.plan.ngram)
        return counts

    def _model(self, slots: Tensor, rows: Rows, experts: list[Tensor], features: Features | None) -> Tensor:
        graphs, model = self.graphs, self.graphs.model
        out = self._logits[: len(rows.tokens)]
        if len(rows.tokens) > len(slots):
            batch = DecodeBatch(slots, graphs.lengths, graphs.tables)
            return model.verify(rows, batch, graphs.kv, self._scratch, experts, out, features)
        live = torch.where(rows.counts > 0, slots, -1)  # who is at its end has no block for its last token
        batch = DecodeBatch(live, graphs.lengths, graphs.tables)
        return model.decode(graphs.last, batch, graphs.kv, graphs.scratch, experts, out)

    _spread = staticmethod(spread_rows)
    _advance = staticmethod(advance_verified)

    def _best(self, logits: Tensor, rows: Rows, chosen: Tensor) -> None:
        advance_greedy(logits, rows.ids, self._space, rows.lengths, chosen, self._greedy)

    def _draw(self, logits: Tensor, rows: Rows, chosen: Tensor) -> None:
        advance_drawn(logits, rows.ids, self._space, rows.lengths, chosen, rows.settings, self._drawing)

    def _look_up(self, slots: Tensor, history: Tensor, lengths: Tensor, ngram: tuple[int, int]) -> None:
        tokens, num = self.drafted.tokens, self.drafted.num
        look_up(slots, history, lengths, tokens, num, self._lookup, ngram_min=ngram[0], ngram_max=ngram[1])


def split_verdict(verdict: Ids, rows: int) -> Verdict:
    """As kernels.verify.read_verdict, of what a Flight's tokens() gave."""
    return Verdict(verdict[:, 0], verdict[:, 1 : 1 + rows], verdict[:, 1 + rows], verdict[:, 2 + rows :])  # type: ignore[arg-type]
