"""The meaning of sparse_attention, in plain torch, a token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowinfer.kernels.token_rows import turned

if TYPE_CHECKING:
    from flowinfer.kernels.token_rows import TokenRows, Turn


def sparse_attention_reference(
    q_TND: Tensor,
    window: Tensor,
    entries: Tensor | None,
    rows: TokenRows,
    *,
    reach: int,
    rate: int = 0,
    sinks_N: Tensor | None = None,
    chosen_TK: Tensor | None = None,
    turn: Turn | None = None,
) -> Tensor:
    """As sparse_attention, in the dtype of its arguments."""
    out = torch.zeros_like(q_TND)
    for t, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        if slot < 0:
            continue
        table, size = rows.block_tables[slot].long(), rows.block_tokens
        first = max(position - reach + 1, int(rows.window_from[t]), 0)
        at = torch.arange(first, position + 1, device=q_TND.device)
        keys = window[table[at // size], at % size]
        if entries is not None:
            numbers = torch.arange((position + 1) // rate, device=q_TND.device)
            if chosen_TK is not None:
                numbers = chosen_TK[t, : len(numbers)].long()
            each = size // rate
            keys = torch.cat((keys, entries[table[numbers // each], numbers % each]))
        scores = q_TND[t] @ keys.t() * q_TND.shape[-1] ** -0.5
        if sinks_N is not None:
            scores = torch.cat((sinks_N.to(scores.dtype).unsqueeze(1), scores), 1)
        shares = scores.softmax(-1)[:, -len(keys) :]
        out[t] = shares @ keys
        if turn is not None:
            out[t] = turned(out[t], turn.cos[t].to(out.dtype), -turn.sin[t].to(out.dtype))
    return out
