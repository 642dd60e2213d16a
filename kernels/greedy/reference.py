"""The meaning of advance_greedy, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def advance_greedy_reference(
    logits_BV: Tensor, slots_B: Tensor, last_S: Tensor, lengths_S: Tensor, chosen_B: Tensor
) -> None:
    """As advance_greedy."""
    values = logits_BV.float().amax(1, keepdim=True)  # NaN where the row has one
    first = (logits_BV.float() == values).int().argmax(1).int()
    chosen_B.copy_(torch.where(values.squeeze(1).isfinite(), first, -1))
    rows = slots_B >= 0
    used = slots_B[rows].long()
    last_S[used] = chosen_B[rows].clamp(min=0)
    lengths_S[used] += 1
