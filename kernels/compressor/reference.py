"""The meaning of compress, in plain torch, a token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowinfer.kernels.token_rows import TokenRows, Turn, turned

if TYPE_CHECKING:
    from flowinfer.kernels.compressor import Pool


def compress_reference(rows_TC: Tensor, pool: Pool, entries: Tensor, tail: Tensor, rows: TokenRows, turn: Turn) -> None:
    """As compress, in the dtype of its arguments."""
    rate, channels = pool.bias.shape
    size, page, ring = entries.shape[2], rows.block_tokens, tail.shape[1]
    tokens = list(enumerate(zip(*(part.tolist() for part in rows[:6]), strict=True)))
    slots = rate * channels // size
    for t, (slot, position, first, _, _, entries_from) in tokens:
        group = (position + 1) // rate - 1
        if slot < 0 or (position + 1) % rate or group < entries_from // rate:
            continue
        values, gates = [], []
        for i, at in enumerate(range((group + 1) * rate - slots, position + 1)):
            if at < 0:
                continue
            there = tail[rows.block_tables[slot, at // page], at % page % ring]
            row = rows_TC[t - (position - at)] if at >= first else there
            half = slice(i // rate * size, i // rate * size + size)
            values.append(row[:channels][half])
            gates.append(row[channels:][half] + pool.bias[i % rate][half])
        entry = (torch.stack(values) * torch.stack(gates).softmax(0)).sum(0)
        entry = entry * torch.rsqrt(entry.square().mean() + pool.eps) * pool.norm_D
        place = rows.block_tables[slot, group * rate // page], group % (page // rate)
        entries[place] = turned(entry, *(part[t].to(entry.dtype) for part in turn)).to(entries.dtype)
    for t, (slot, position, _, end, _, _) in tokens:
        if slot >= 0 and position + ring >= min(end, (position // page + 1) * page):
            tail[rows.block_tables[slot, position // page], position % page % ring] = rows_TC[t].to(tail.dtype)
