"""The meaning of advance_drawn: kernels/sampling's reference, row by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowinfer.kernels.sampling import reference, stream_keys

if TYPE_CHECKING:
    from flowinfer.kernels.draw import SlotSettings


def advance_drawn_reference(
    logits_BV: Tensor, slots_B: Tensor, last_S: Tensor, lengths_S: Tensor, chosen_B: Tensor, settings: SlotSettings
) -> None:
    """As advance_drawn, on a CPU."""
    chosen_B.fill_(-1)
    rows = (slots_B >= 0).nonzero().flatten()
    slots = slots_B[rows].long()
    logits = logits_BV[rows].float()
    temperature, top_k, top_p, min_p, seeds = (column[slots] for column in settings)
    keys = stream_keys(seeds.numpy().view("uint64"), lengths_S[slots].numpy().astype("int64"))
    warm = torch.where(temperature > 0, temperature, 1)
    drawn = reference.sample(
        reference.filtered(logits, warm, top_k.long(), top_p, min_p), torch.from_numpy(keys.view("int64"))
    )
    values, best = logits.max(1)
    tokens = torch.where(temperature > 0, drawn, best)
    chosen = torch.where(values.isfinite(), tokens, -1).int()
    chosen_B[rows] = chosen
    last_S[slots] = chosen.clamp(min=0)
    lengths_S[slots] += 1
