"""`draft: model`: a second, smaller model drafts for the whole batch, token after token, over KV of its own.

It shares nothing with the target but the token ids: its own weights, its own blocks, freed when a sequence ends, is
cancelled or preempted. Where its blocks don't suffice, sequences go undrafted; nobody waits. A prompt is run through it
CATCH_UP tokens a step at most, so that a long one doesn't hold up the others. What it drafts is chosen with the
request's own settings and noise (see drafts.Choose); its confidence is its own probability of it.

Legend: n sequences, D drafts (`block`), T tokens of a forward pass, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flowinfer.engine.pool import KVPool
from flowinfer.engine.step import StepInput
from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafts import F32, Choose, Guesses, Ran
from flowinfer.stages.spec_verify.policy import I64, Flags

if TYPE_CHECKING:
    from torch import Tensor

    from flowinfer.engine.layout import KVLayout
    from flowinfer.engine.models.decoder import Model
    from flowinfer.engine.models.deepseek_v4.model import V4Model

CATCH_UP = 512  # prompt tokens a step
NEAR = 16  # tokens behind at most, for a sequence to be drafted for: more than a step can give


class ModelDraft:
    """Drafts of the batch whose history is `tokens`; see drafts.Drafter."""

    needs_features: tuple[int, ...] = ()
    needs_host = True
    calibrated = False

    def __init__(self, model: Model | V4Model, layout: KVLayout, tokens: Ids, *, block: int, num_blocks: int) -> None:
        """layout: of the model's KV, of which num_blocks blocks are taken.  tokens: the batch's, read in place."""
        max_slots, max_tokens = tokens.shape
        self.block = block
        self._model, self._layout, self._tokens = model, layout, tokens
        self._kv = torch.zeros(
            (num_blocks, *layout.block_shape), dtype=getattr(torch, layout.dtype), device=model.device
        )
        self._pool = KVPool(0, num_blocks, cached_limit=0, on_stored=_nobody, on_removed=_nobody)
        self._longest = min(max_tokens + block, model.config.max_positions)
        self._tables = np.zeros((max_slots, layout.blocks_for(self._longest)), np.int32)
        self._num_blocks = np.zeros(max_slots, np.int64)
        self._valid = np.zeros(max_slots, np.int64)  # leading tokens of the history whose KV is there
        self._drafts = np.zeros((max_slots, block), np.int32)
        self._drafted_at = np.full(max_slots, -1, np.int64)  # position of the first draft; -1: there is none

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    def join(self, slot: int) -> None:
        """The slot has a new sequence, of which nothing is computed."""
        self.leave(slot)

    def leave(self, slot: int) -> None:
        """Frees its blocks."""
        self._pool.release(self._tables[slot, : self._num_blocks[slot]].tolist())
        self._num_blocks[slot] = self._valid[slot] = 0
        self._drafted_at[slot] = -1

    def observe(self, ran: Ran) -> None:
        """The history says it all."""

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        """Drafts by D forward passes, the first over all tokens that are new to this model."""
        self._settle(slots, num_tokens)
        found = self._with_room(slots, num_tokens)
        self._catch_up(slots[found], num_tokens[found])
        found &= num_tokens - self._valid[slots] <= NEAR
        drafts = np.zeros((slots.size, self.block), np.int32)
        chances = np.zeros((slots.size, self.block), np.float32)
        if found.any():
            self._draft(slots, num_tokens, found, choose, drafts, chances)
        self._drafts[slots] = drafts
        self._drafted_at[slots] = np.where(found, num_tokens, -1)
        return Guesses(found, drafts, chances)

    @torch.inference_mode()
    def _draft(self, slots: Ids, num_tokens: Ids, found: Flags, choose: Choose, drafts: Ids, chances: F32) -> None:
        able, lengths = slots[found], num_tokens[found].astype(np.int64)
        starts = np.minimum(self._valid[able], lengths - 1)  # the last token gives the first draft's logits
        tokens = self._histories(able, starts, lengths)
        rows = torch.from_numpy(np.flatnonzero(found)).to(self._model.device)
        for j in range(self.block):
            logits = self._run(able, tokens, starts, lengths, want_logits=True)
            assert logits is not None
            everybody = logits.new_zeros((slots.size, logits.shape[1]))
            everybody[rows] = logits
            chosen = choose(j, everybody)[rows]
            chances[found, j] = logits.softmax(1).gather(1, chosen[:, None])[:, 0].cpu().numpy()
            drafts[found, j] = tokens = chosen.cpu().numpy().astype(np.int32)
            starts, lengths = lengths, lengths + 1
        self._valid[able] = num_tokens[found]

    def _settle(self, slots: Ids, num_tokens: Ids) -> None:
        """Drafts that became history needn't be run again."""
        drafted = self._drafted_at[slots] >= 0
        slots, num_tokens = slots[drafted], num_tokens[drafted]
        first = self._drafted_at[slots]
        places = first[:, None] + np.arange(self.block)
        came = self._tokens[slots[:, None], np.minimum(places, self._tokens.shape[1] - 1)]
        held = np.logical_and.accumulate((came == self._drafts[slots]) & (places < num_tokens[:, None]), axis=1)
        self._valid[slots] = first + np.minimum(held.sum(1), self.block - 1)  # the last draft was never run
        self._drafted_at[slots] = -1

    def _with_room(self, slots: Ids, num_tokens: Ids) -> Flags:
        """Which sequences have blocks for their history and their drafts; takes them."""
        wanted = num_tokens.astype(np.int64) + self.block
        fits: Flags = wanted <= self._longest
        missing = -(-wanted // self._layout.block_tokens) - self._num_blocks[slots]
        for i in np.flatnonzero(fits & (missing > 0)).tolist():
            slot, count = int(slots[i]), int(missing[i])
            blocks = self._pool.allocate(count)
            if blocks is None:
                fits[i] = False
                continue
            have = int(self._num_blocks[slot])
            self._tables[slot, have : have + count] = blocks
            self._num_blocks[slot] = have + count
        return fits

    @torch.inference_mode()
    def _catch_up(self, slots: Ids, num_tokens: Ids) -> None:
        """Runs up to CATCH_UP tokens of those sequences that are far behind, the first ones first."""
        behind = num_tokens - 1 - self._valid[slots]
        far = behind >= NEAR
        if not far.any():
            return
        slots, behind = slots[far], behind[far]
        before = np.cumsum(behind) - behind
        counts = np.clip(CATCH_UP - before, 0, behind)
        slots, counts = slots[counts > 0], counts[counts > 0]
        starts, ends = self._valid[slots], self._valid[slots] + counts
        self._run(slots, self._histories(slots, starts, ends), starts, ends, want_logits=False)
        self._valid[slots] = ends

    def _histories(self, slots: Ids, starts: I64, ends: I64) -> Ids:
        """The tokens from starts[i] to ends[i], flat."""
        return np.concatenate([self._tokens[s, a:b] for s, a, b in zip(slots, starts, ends, strict=True)])

    def _run(self, slots: Ids, tokens: Ids, starts: I64, ends: I64, *, want_logits: bool) -> Tensor | None:
        """Runs flat tokens that lie at starts[i] .. ends[i] of the sequences; float32 logits [n, V] of each last."""
        device, counts = self._model.device, ends - starts
        query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.arange(len(tokens)) - np.repeat(query_starts[:-1] - starts, counts)
        step = StepInput(
            tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            query_starts=query_starts,
            kv_lens=ends.astype(np.int32),
            block_tables=self._tables[slots, : self._layout.blocks_for(int(ends.max()))],
            logit_rows=torch.from_numpy(query_starts[1:].astype(np.int64) - 1).to(device) if want_logits else None,
        )
        return self._model.forward(step, self._kv)


def _nobody(names: list[bytes]) -> None:
    """Nothing of these blocks is ever cached."""
