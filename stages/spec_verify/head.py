"""`draft: head`: a small network that reads the target's layers and drafts its whole block for all sequences at once.

Its context of a sequence (features of the last tokens that the target ran) lies by slot where the model is, starts
empty whenever the sequence comes to the slot, and fills with what decode runs from then on: heads are trained for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafts import Choose, Guesses, Ran

if TYPE_CHECKING:
    from flowinfer.engine.draft import DraftHead


class HeadDraft:
    """Drafts of the batch whose history is `tokens`; see drafts.Drafter."""

    needs_host = False
    calibrated = False

    def __init__(self, head: DraftHead, tokens: Ids, device: torch.device) -> None:
        """tokens: the batch's history, int32 [max_slots, max_tokens], read in place."""
        self.block, self.needs_features = head.block, head.feature_layers
        self._head, self._tokens, self._device = head, tokens, device
        self._state = head.new_state(len(tokens))

    def join(self, slot: int) -> None:
        """Nothing is known of it."""
        self._state.join(slot)

    def leave(self, slot: int) -> None:
        """Is forgotten when another joins."""

    def observe(self, ran: Ran) -> None:
        """Takes the features of what holds."""
        if ran.features is not None and ran.slots.size:
            slots, positions = self._sent(ran.slots, ran.positions)
            self._state.append(slots, positions, ran.features)

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        """One pass; token after token is chosen as the target will."""
        rows, anchors, positions = self._sent(slots, self._tokens[slots, num_tokens - 1], num_tokens - 1)
        tokens, confidences = self._head.draft(self._state, rows, anchors, positions, choose)
        found = np.ones(slots.size, np.bool_)
        return Guesses(found, tokens.cpu().numpy().astype(np.int32), confidences.float().cpu().numpy())

    def _sent(self, *columns: Ids) -> tuple[torch.Tensor, ...]:
        """The columns on the device, int64, by one copy."""
        packed = np.stack(columns).astype(np.int64)
        return torch.from_numpy(packed).to(self._device).unbind(0)
