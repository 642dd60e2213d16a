"""The meaning of indexer_topk, in plain torch: scores as a product, and a stable sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from flowinfer.kernels.token_rows import TokenRows


def index_scores_reference(q_HD: Tensor, weights_H: Tensor, keys_ED: Tensor) -> Tensor:
    """[E]: scores of the entries for one token, in the dtype of the arguments."""
    products = F.relu(q_HD @ keys_ED.t()) * q_HD.shape[-1] ** -0.5
    scores: Tensor = (products * weights_H.unsqueeze(1)).sum(0)
    return scores


def indexer_topk_reference(
    q_THD: Tensor, weights_TH: Tensor, keys: Tensor, rows: TokenRows, *, rate: int, top: int
) -> Tensor:
    """As indexer_topk, a token at a time, in the dtype of its arguments."""
    chosen = torch.full((len(q_THD), top), -1, dtype=torch.int32, device=q_THD.device)
    each = rows.block_tokens // rate
    for t, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        visible = (position + 1) // rate if slot >= 0 else 0
        numbers = torch.arange(visible, device=q_THD.device)
        if visible > top:
            table = rows.block_tables[slot].long()
            scores = index_scores_reference(q_THD[t], weights_TH[t], keys[table[numbers // each], numbers % each])
            numbers = scores.sort(descending=True, stable=True).indices[:top].sort().values
        chosen[t, : len(numbers)] = numbers.int()
    return chosen
