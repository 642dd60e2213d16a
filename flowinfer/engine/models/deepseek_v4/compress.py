"""Compressed entries: projects a step's tokens, closes the groups that are complete, keeps the rows of the open one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.ops import pool, rms, rotate, rotations
from flowinfer.engine.models.deepseek_v4.plan import Closing
from flowinfer.engine.models.linear import Projection


@dataclass(frozen=True, slots=True)
class Compressor:
    """Weights of one compressor. Entries have D channels; with overlap a token projects 2 D: for the next group, then
    for its own.  project: value and gate in one product.  bias [rate, channels] float32 on the gates.
    """

    project: Projection
    bias: Tensor
    norm_D: Tensor
    overlap: bool
    inverse: Tensor
    eps: float

    @property
    def slots(self) -> int:
        """Rows that one entry is made of."""
        return self.bias.shape[0] * (2 if self.overlap else 1)


def compress(x_TH: Tensor, weights: Compressor, entries: Tensor, tail: Tensor, closing: Closing) -> None:
    """Writes the entries that this step completes into `entries` [blocks, n, D], and open rows into `tail`.

    tail is [blocks, ring, 2 * channels]: value and gate. Rows already there are read before any is written.
    """
    rows = weights.project(x_TH)
    if len(closing.starts):
        earlier = tail[closing.ring.blocks, closing.ring.rows]
        source = torch.where(closing.in_step.unsqueeze(-1), rows[closing.source], earlier)
        entries[closing.entries.blocks, closing.entries.rows] = _close(source, weights, closing)
    tail[closing.kept_rows.blocks, closing.kept_rows.rows] = rows[closing.kept]


def _close(source: Tensor, weights: Compressor, closing: Closing) -> Tensor:
    """[G, D] entries of rows [G, slots, 2 * channels]."""
    values, gates = source.chunk(2, -1)
    if weights.overlap:
        rate, half = weights.bias.shape[0], values.shape[-1] // 2
        gates = gates + weights.bias.repeat(2, 1)
        values = torch.cat((values[:, :rate, :half], values[:, rate:, half:]), 1)
        gates = torch.cat((gates[:, :rate, :half], gates[:, rate:, half:]), 1)
        values = values.masked_fill(~closing.exists.unsqueeze(-1), 0)
        gates = gates.masked_fill(~closing.exists.unsqueeze(-1), -torch.inf)
    else:
        gates = gates + weights.bias
    entries = rms(pool(values, gates), weights.norm_D, weights.eps)
    return rotate(entries, *rotations(closing.starts, weights.inverse))


@dataclass(frozen=True, slots=True)
class Indexer:
    """Weights of the lightning indexer, which picks the entries that a token attends to."""

    compressor: Compressor
    query: Projection
    weigh: Projection
    heads: int


def index_scores(q_QHD: Tensor, keys_ED: Tensor, weights_QH: Tensor) -> Tensor:
    """[..., Q, E]: sum over heads of weight * relu(q . k), scaled; leading dimensions broadcast."""
    q, keys = q_QHD.float(), keys_ED.float()
    scores = F.relu(torch.einsum("...qhd,...ed->...qhe", q, keys)) * q.shape[-1] ** -0.5
    total: Tensor = (scores * weights_QH.unsqueeze(-1)).sum(-2)
    return total
