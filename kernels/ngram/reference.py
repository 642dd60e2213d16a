"""The meaning of look_up, a sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def look_up_reference(
    slots_B: Tensor,
    history_SP: Tensor,
    lengths_S: Tensor,
    drafts_SD: Tensor,
    num_S: Tensor,
    *,
    ngram_min: int,
    ngram_max: int,
) -> None:
    """As look_up."""
    for slot in slots_B.tolist():
        if slot < 0:
            continue
        text = history_SP[slot, : int(lengths_S[slot])].tolist()
        place = _latest(text, ngram_min, ngram_max)
        num_S[slot] = 0 if place is None else drafts_SD.shape[1]
        if place is not None:
            drafts = [text[place + j % (len(text) - place)] for j in range(drafts_SD.shape[1])]
            drafts_SD[slot] = torch.tensor(drafts, dtype=torch.int32)


def _latest(text: list[int], ngram_min: int, ngram_max: int) -> int | None:
    """Where the text goes on behind the latest earlier place of the longest n-gram that ends it."""
    for length in range(ngram_max, ngram_min - 1, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[len(text) - length :]:
                return place
    return None
