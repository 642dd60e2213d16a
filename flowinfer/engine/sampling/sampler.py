"""Chooses the target's token for every row of a decode step, as each sequence's settings say. Accepts and ends nothing.

Order for one row: raw logits (these give logprobs) -> logit_bias, and -inf for ends of text while min_tokens isn't
reached -> repetition, then frequency and presence penalties -> the grammar's mask -> temperature -> min-p -> top-k ->
top-p -> sample.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowinfer.engine.grammar import Grammars, grammar_error
from flowinfer.engine.sampling.constraint import Constraint
from flowinfer.engine.sampling.history import History
from flowinfer.errors import RequestError
from flowinfer.kernels.sampling import RowEdits, RowParams, RowSampler, argmax, sample, stream_keys
from flowinfer.message import Ids, Sampling

_COLDEST = 1e-5  # below it a temperature is greedy: logits over it would leave float32


def seed_of(sampling: Sampling, request: str) -> int:
    """The request's seed as 64 bits; without one, a digest of the request id, so that a replay repeats itself."""
    if sampling.seed is not None:
        return sampling.seed & 0xFFFFFFFFFFFFFFFF
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little")


class Choice(NamedTuple):
    """How tokens are chosen, as kernels take it. temperature 0: the best one. top_k 0, top_p 1, min_p 0: off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


def choice_of(sampling: Sampling, request: str, vocab_size: int) -> Choice:
    """A request's settings as Choice."""
    temperature = 0.0 if sampling.temperature < _COLDEST else sampling.temperature
    top_k = max(0, sampling.top_k) if sampling.top_k < vocab_size else 0
    return Choice(temperature, top_k, sampling.top_p, sampling.min_p, seed_of(sampling, request))


def needs_no_host(sampling: Sampling) -> bool:
    """Whether the device can choose the tokens alone: the logits are taken as they are, and only ids are asked for."""
    edited = sampling.logit_bias or sampling.min_tokens > 0 or sampling.grammar is not None or History.needed(sampling)
    return not edited and sampling.logprobs is None


class Sampler:
    """Sampling state by slot. Most slots are `plain` (greedy, nothing to edit), and a batch of those is one argmax.

    Noise hangs on (seed, position, token) alone, so a request gets the same tokens alone, in any batch, with or without
    drafts, and after a preemption: join rebuilds all state from the history.
    """

    def __init__(
        self, *, max_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], grammars: Grammars | None = None
    ) -> None:
        """grammars: of the model; without it, no sequence may have a grammar."""
        self.vocab_size, self.eos_token_ids, self._grammars = vocab_size, eos_token_ids, grammars
        self.plain = np.ones(max_slots, np.bool_)
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int64)
        self._top_p = np.ones(max_slots, np.float32)
        self._min_p = np.zeros(max_slots, np.float32)
        self._seeds = np.zeros(max_slots, np.uint64)
        self._min_position = np.zeros(max_slots, np.int64)  # from here on a sequence may end
        self._sampling: dict[int, Sampling] = {}  # slots with edits only
        self._histories: dict[int, History] = {}
        self._constraints: dict[int, Constraint] = {}
        self._rows = RowSampler(vocab_size)

    def join(self, slot: int, sampling: Sampling, request: str, tokens: Ids, num_prompt: int) -> None:
        """Takes up a sequence. tokens int32: prompt and, after a preemption, the output so far.

        Raises RequestError where its grammar can't be followed.
        """
        choice = choice_of(sampling, request, self.vocab_size)
        self._temperature[slot], self._top_k[slot], self._top_p[slot], self._min_p[slot], self._seeds[slot] = choice
        self._min_position[slot] = num_prompt + min(sampling.min_tokens, 2**31)
        self.leave(slot)
        if History.needed(sampling):
            self._histories[slot] = History(sampling, tokens, num_prompt, self.vocab_size)
        if sampling.grammar is not None:
            assert self._grammars is not None, "moe-decode gives the batch its grammars"
            ends = (*self.eos_token_ids, *sampling.stop_token_ids)
            grammar, output = sampling.grammar, tokens[num_prompt:]
            matcher = self._grammars.start(grammar)
            self._constraints[slot] = Constraint(matcher, ends, output, grammar.after, grammar.opens)
        edited = slot in self._histories or slot in self._constraints
        if edited or sampling.logit_bias or sampling.min_tokens > 0:
            self._sampling[slot] = sampling
        self.plain[slot] = choice.temperature == 0 and slot not in self._sampling

    def leave(self, slot: int) -> None:
        """Forgets the sequence of this slot; harmless where there is none."""
        self._sampling.pop(slot, None)
        self._histories.pop(slot, None)
        self._constraints.pop(slot, None)
        self.plain[slot] = True

    def choose(self, logits: Tensor, slots: Ids, starts: Ids, positions: Ids, drafts: Ids) -> NDArray[np.int64]:
        """The target's own token of every row, int64 [rows]; -1 where the logits aren't finite.

        logits: float32 [rows, vocab].  slots[i] owns rows starts[i]:starts[i+1], of its last token and its drafts.
        positions [n]: index in its sequence of the token that its first row gives.  drafts int32 [n, D], padded.
        """
        plain = self.plain[slots]
        if plain.all():
            return argmax(logits)
        chosen = argmax(logits) if plain.any() else np.empty(int(starts[-1]), np.int64)
        rows, owners, edits = self._picky_rows(np.flatnonzero(~plain), slots, starts, positions, drafts)
        at = positions[owners] + rows - starts[owners]
        chosen[rows] = sample(logits, rows, self._params(slots[owners], at), edits, self._rows)
        return chosen

    def draft(self, logits: Tensor, slots: Ids, positions: Ids, drafts: Ids) -> NDArray[np.int64]:
        """What `choose` would take for each slot if these were the target's logits, int64 [n]; 0 where nothing can be.

        logits: float32 [n, vocab], of a drafter.  positions [n]: index in its sequence of the token that is chosen.
        drafts int32 [n, k]: the tokens before it that are drafts too. With equal logits, the tokens are equal.
        """
        picky = np.flatnonzero(~self.plain[slots])
        tokens = argmax(logits) if picky.size < slots.size else np.zeros(slots.size, np.int64)
        if picky.size:
            behind = zip(picky.tolist(), slots[picky].tolist(), positions[picky].tolist(), strict=True)
            edits = [self._edit_behind(slot, position, drafts[i]) for i, slot, position in behind]
            params = self._params(slots[picky], positions[picky].astype(np.int64))
            tokens[picky] = sample(logits, picky, params, edits, self._rows)
        return np.maximum(tokens, 0)

    def advance(self, slot: int, output: Ids) -> None:
        """Counts tokens that were taken into the output; only slots in `tracked` need it."""
        for state in (self._histories.get(slot), self._constraints.get(slot)):
            if state is not None:
                state.extend(output)

    def fitting(self, slot: int, drafts: Ids) -> int:
        """How many of these drafts the grammar of the slot allows; all where it has none."""
        constraint = self._constraints.get(slot)
        return drafts.size if constraint is None else constraint.fitting(drafts)

    def failure(self, slot: int) -> RequestError | None:
        """Why no token could be chosen for this slot, if its grammar is the reason."""
        constraint, sampling = self._constraints.get(slot), self._sampling.get(slot)
        if constraint is None or sampling is None or sampling.grammar is None:
            return None
        return grammar_error(sampling.grammar, constraint.error or "no token of this model can go on from here.")

    @property
    def tracked(self) -> frozenset[int]:
        """Slots whose penalties or grammar follow the output."""
        return frozenset(self._histories) | self.constrained

    @property
    def constrained(self) -> frozenset[int]:
        """Slots that have a grammar."""
        return frozenset(self._constraints)

    def _picky_rows(
        self, chosen: NDArray[np.int64], slots: Ids, starts: Ids, positions: Ids, drafts: Ids
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[RowEdits | None]]:
        rows: list[int] = []
        owners: list[int] = []
        edits: list[RowEdits | None] = []
        for i in chosen.tolist():
            first, end = int(starts[i]), int(starts[i + 1])
            rows += range(first, end)
            owners += [i] * (end - first)
            edits += self._edits(int(slots[i]), int(positions[i]), drafts[i, : end - first - 1])
        return np.array(rows, np.int64), np.array(owners, np.int64), edits

    def _edits(self, slot: int, position: int, drafts: Ids) -> list[RowEdits | None]:
        """Edits of the rows of the last token and of each draft, as if the drafts before it were taken."""
        sampling = self._sampling.get(slot)
        if sampling is None:
            return [None] * (drafts.size + 1)
        constraint, history = self._constraints.get(slot), self._histories.get(slot)
        allowed = [None] * (drafts.size + 1) if constraint is None else constraint.with_drafts(drafts)
        edits = [self._edit(slot, sampling, position + j, bits) for j, bits in enumerate(allowed)]
        if history is not None:
            for edit, (seen, subtract) in zip(edits, history.with_drafts(drafts), strict=True):
                edit.seen, edit.subtract, edit.repetition = seen, subtract, history.repetition
        return list(edits)

    def _edit_behind(self, slot: int, position: int, drafts: Ids) -> RowEdits | None:
        """Edits of the one row behind all these drafts, at `position`; behind a refused one, any will do."""
        sampling = self._sampling.get(slot)
        if sampling is None:
            return None
        constraint, history = self._constraints.get(slot), self._histories.get(slot)
        edit = self._edit(slot, sampling, position, constraint.behind(drafts) if constraint else None)
        if history is not None:
            edit.seen, edit.subtract = history.with_drafts(drafts)[-1]
            edit.repetition = history.repetition
        return edit

    def _edit(self, slot: int, sampling: Sampling, position: int, allowed: NDArray[np.uint8] | None) -> RowEdits:
        must_end = allowed is not None and not self._constraints[slot].may_go_on(allowed)
        edit = self._bias(sampling, may_end=must_end or position >= self._min_position[slot])
        edit.allowed = allowed
        return edit

    def _bias(self, sampling: Sampling, *, may_end: bool) -> RowEdits:
        bias = dict(sampling.logit_bias)
        if not may_end:
            ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.eos_token_ids)
            bias |= dict.fromkeys(ends, -np.inf)
        inside = [(token, value) for token, value in bias.items() if 0 <= token < self.vocab_size]
        if not inside:
            return RowEdits()
        tokens, values = zip(*inside, strict=True)
        return RowEdits(np.array(tokens, np.int64), np.array(values, np.float32))

    def _params(self, slots: Ids, positions: NDArray[np.int64]) -> RowParams:
        return RowParams(
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            stream_keys(self._seeds[slots], positions),
        )
