"""The sequences that one engine decodes, as arrays by slot. Knows nothing of models or sockets.

Legend: slot, the row of a sequence in every array here; it is reused, and `version` tells one tenant from the next.
One owner per field: moe-decode adds and places (add, finish, blocks), spec-verify writes the history (tokens,
num_tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowinfer.engine.draft_plan import DraftPlan
from flowinfer.engine.grammar import Grammars
from flowinfer.engine.sampling import choice_of, needs_no_host
from flowinfer.message import Ids, Progress, Sequence

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine


class Batch:
    """Structure of arrays over at most `max_slots` sequences of at most `max_tokens` tokens, drafts not counted.

    tokens int32 [max_slots, max_tokens]: prompt and accepted output.  num_tokens, num_prompt int32 [max_slots].
    blocks int32 [max_slots, max_blocks]: arena block ids, num_blocks of them valid.  version int64 [max_slots].
    num_changes: of all versions; while it stands still, whoever was in the batch still is.
    joined: slots added since spec-verify last looked; it takes and clears the list.
    limit int32 [max_slots]: length at which a sequence ends.  on_device bool [max_slots]: its tokens can be chosen
    without the host, by `choices`, one column a field of sampling.Choice.  drafting: whether spec-verify drafts at all.
    feature_layers: target layers (0-based) whose output the drafter wants with the logits, by spec-verify.
    engine, model_name: what runs the batch and what the file calls its model, by moe-decode, for whoever drafts.
    overlaps: whether steps of sequences that need no host can run ahead of it while it drafts nothing, by moe-decode.
    plan: what captured steps are to do about drafts, by spec-verify, which then calls replan; by moe-decode.
    most_drafts int32 [max_slots]: drafts of each slot that are verified of those that the device made, by spec-verify.
    progress_of: what a sequence with this history has given, used and learned; spec-verify knows.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_tokens: int,
        max_drafts: int,
        block_tokens: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        on_finish: Callable[[int], None],
        grammars: Grammars | None = None,
    ) -> None:
        self.max_slots, self.max_tokens, self.max_drafts = max_slots, max_tokens, max_drafts
        self.block_tokens = block_tokens
        self.eos_token_ids, self.vocab_size, self.grammars = eos_token_ids, vocab_size, grammars
        max_blocks = -(-(max_tokens + max_drafts) // block_tokens)
        self.tokens: Ids = np.zeros((max_slots, max_tokens), np.int32)
        self.blocks: Ids = np.zeros((max_slots, max_blocks), np.int32)
        self.num_tokens: Ids = np.zeros(max_slots, np.int32)
        self.num_prompt: Ids = np.zeros(max_slots, np.int32)
        self.num_blocks: Ids = np.zeros(max_slots, np.int32)
        self.limit: Ids = np.zeros(max_slots, np.int32)
        self.on_device: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self.choices = tuple(np.zeros(max_slots, dtype) for dtype in ("f4", "i4", "f4", "f4", "u8"))
        self.drafting = True  # until spec-verify says otherwise
        self.exact_draws = False  # whether who else is in the batch mustn't decide where a token is drawn
        self.feature_layers: tuple[int, ...] = ()
        self.overlaps = False
        self.plan = DraftPlan()
        self.replan: Callable[[], None] = lambda: None
        self.most_drafts: Ids = np.zeros(max_slots, np.int32)
        self.engine: Engine | None = None
        self.model_name = ""
        self.version: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.num_changes = 0
        self.ids: list[str | None] = [None] * max_slots
        self.prompts: list[Sequence | None] = [None] * max_slots
        self.joined: list[int] = []
        self.slot_of: dict[str, int] = {}
        self.progress_of: Callable[[Sequence, Ids], Progress | None] = lambda sequence, history: sequence.progress
        self._free = list(range(max_slots - 1, -1, -1))
        self._on_finish = on_finish

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        """Slots that `add` can still give."""
        return len(self._free)

    def add(self, sequence: Sequence, history: Ids, blocks: Ids) -> int:
        """Gives the sequence a slot. history: prompt and, after a preemption, output so far; blocks: its KV so far."""
        slot = self._free.pop()
        self._changed(slot)
        self.ids[slot], self.prompts[slot] = sequence.id, sequence
        self.tokens[slot, : len(history)] = history
        self.num_tokens[slot], self.num_prompt[slot] = len(history), len(sequence.tokens)
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.most_drafts[slot] = 0
        self.limit[slot] = min(len(sequence.tokens) + sequence.sampling.max_tokens, self.max_tokens)
        self.on_device[slot] = needs_no_host(sequence.sampling)
        if self.exact_draws and sequence.sampling.temperature > 0:
            self.on_device[slot] = False
        for column, value in zip(self.choices, choice_of(sequence.sampling, sequence.id, self.vocab_size), strict=True):
            column[slot] = value
        self.slot_of[sequence.id] = slot
        self.joined.append(slot)
        return slot

    def append_blocks(self, slots: Ids, counts: Ids, blocks: list[int]) -> None:
        """Puts counts[i] more blocks at the end of each slot's table, in turn."""
        columns = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - self.num_blocks[slots], counts)
        self.blocks[np.repeat(slots, counts), columns] = blocks
        self.num_blocks[slots] += counts

    def history(self, slot: int) -> Ids:
        """A copy of the tokens of this slot, prompt and output."""
        return self.tokens[slot, : self.num_tokens[slot]].copy()

    def finish(self, slot: int) -> None:
        """The sequence ended: frees its slot and its KV at once."""
        self._on_finish(slot)
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Takes the sequence out of the batch; whoever calls this keeps or frees the KV."""
        id = self.ids[slot]
        assert id is not None, "a slot is removed once"
        del self.slot_of[id]
        self.ids[slot] = self.prompts[slot] = None
        self.num_tokens[slot] = self.num_blocks[slot] = 0
        self._changed(slot)
        if slot in self.joined:
            self.joined.remove(slot)
        self._free.append(slot)

    def _changed(self, slot: int) -> None:
        self.version[slot] += 1
        self.num_changes += 1

    def live(self, slots: Ids, versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these slots still hold the sequence that they held when `versions` was read."""
        alive: NDArray[np.bool_] = self.version[slots] == versions
        return alive
