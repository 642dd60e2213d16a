"""Which sequence spec-verify knows in each slot, and what it has used so far. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Finish, FinishReason, Ids, Opening, Sequence

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch


class Tenants:
    """Sequences by slot, from the first step that they run in until they end, also through preemptions.

    on_leave is told of each slot that falls empty.  usage int64 [slots, 3]: cached, drafted, accepted tokens.
    """

    def __init__(self, batch: Batch, on_leave: Callable[[int], None]) -> None:
        self._batch, self._on_leave = batch, on_leave
        self.ids = [""] * batch.max_slots
        self.slot_of: dict[str, int] = {}
        self.usage = np.zeros((batch.max_slots, 3), np.int64)
        self.displaced: dict[str, NDArray[np.int64]] = {}  # usage of preempted sequences whose slot another has now
        self.unopened: set[int] = set()
        self._version = np.full(batch.max_slots, -1, np.int64)

    def known(self, slots: Ids) -> NDArray[np.bool_]:
        """Which slots still hold the sequence that moved in; bool [n]."""
        same: NDArray[np.bool_] = self._version[slots] == self._batch.version[slots]
        return same

    def move_in(self, slot: int) -> None:
        """Takes up the sequence that the batch has in this slot; one that was preempted keeps its usage."""
        batch, prompt, request = self._batch, self._batch.prompts[slot], self._batch.ids[slot]
        assert prompt is not None and request is not None, "a slot that joined holds a sequence"
        usage = self._usage_so_far(request)
        if self.ids[slot]:  # was preempted and will come back elsewhere
            self.displaced[self.ids[slot]] = self.usage[slot].copy()
            self.move_out(slot)
        self.usage[slot] = _first_usage(prompt) if usage is None else usage
        self.ids[slot], self.slot_of[request] = request, slot
        self._version[slot] = batch.version[slot]
        given = 0 if prompt.progress is None else len(prompt.progress.output)
        if batch.num_tokens[slot] == batch.num_prompt[slot] + given:
            self.unopened.add(slot)

    def move_out(self, slot: int) -> None:
        """Forgets the sequence of this slot."""
        self.slot_of.pop(self.ids[slot], None)
        self.ids[slot], self._version[slot] = "", -1
        self.unopened.discard(slot)
        self._on_leave(slot)

    def forget(self, requests: Collection[str]) -> None:
        """Forgets these sequences wherever they are; unknown ids are normal."""
        for request in requests:
            self.displaced.pop(request, None)
            slot = self.slot_of.get(request)
            if slot is not None:
                self.move_out(slot)

    def open(self, slots: list[int]) -> list[Opening]:
        """Openings of those of the slots that give their first tokens now."""
        if not self.unopened:
            return []
        first = [slot for slot in slots if slot in self.unopened]
        self.unopened.difference_update(first)
        return [self._opening(slot) for slot in first]

    def finish(self, slot: int, reason: FinishReason, stop: int | None) -> Finish:
        """The last word on the sequence of this slot, which leaves it and the batch."""
        num_prompt, num_tokens = int(self._batch.num_prompt[slot]), int(self._batch.num_tokens[slot])
        cached, drafted, accepted = self.usage[slot].tolist()
        self.move_out(slot)
        self._batch.finish(slot)
        return Finish(
            reason=reason,
            prompt_tokens=num_prompt,
            completion_tokens=num_tokens - num_prompt,
            cached_tokens=cached,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            stop=stop,
        )

    def _opening(self, slot: int) -> Opening:
        prompt = self._batch.prompts[slot]
        assert prompt is not None, "a slot that is known holds a sequence"
        return Opening(
            id=prompt.id,
            sampling=msgspec.structs.replace(prompt.sampling, grammar=None),  # text needs it not, and it may be long
            prompt_tokens=int(self._batch.num_prompt[slot]),
            cached_tokens=int(self.usage[slot, 0]),
            stored_tokens=self._stored(prompt),
            first_token=int(self._batch.tokens[slot, 0]),
            prompt_logprobs=prompt.prompt_logprobs,
            before=None if prompt.progress is None else prompt.progress.output,
            giver="" if prompt.progress is None else prompt.progress.giver,
        )

    def _stored(self, prompt: Sequence) -> int:
        """Tokens of the prompt that its prefill put into the prefix cache: those of new full blocks."""
        if prompt.kv is None or prompt.prefix is None:
            return 0
        size = self._batch.block_tokens
        return max(0, prompt.kv.num_tokens // size * size - prompt.kv.cached_tokens)

    def usage_of(self, sequence: Sequence) -> tuple[int, int, int]:
        """Cached, drafted and accepted tokens of a sequence, wherever it is."""
        slot = self.slot_of.get(sequence.id)
        found = self.displaced.get(sequence.id) if slot is None else self.usage[slot]
        if found is None:
            return _first_usage(sequence)
        cached, drafted, accepted = found.tolist()
        return cached, drafted, accepted

    def _usage_so_far(self, request: str) -> NDArray[np.int64] | None:
        """Of a sequence that is back after a preemption: from its old slot, unless another took that meanwhile."""
        slot = self.slot_of.get(request)
        if slot is None:
            return self.displaced.pop(request, None)
        usage: NDArray[np.int64] = self.usage[slot].copy()
        self.move_out(slot)
        return usage


def _first_usage(sequence: Sequence) -> tuple[int, int, int]:
    """Of a sequence that is new here: what another worker counted of it, else the cached tokens of its prompt."""
    if sequence.progress is not None:
        return sequence.progress.cached_tokens, sequence.progress.drafted_tokens, sequence.progress.accepted_tokens
    return (sequence.kv.cached_tokens if sequence.kv else 0), 0, 0
