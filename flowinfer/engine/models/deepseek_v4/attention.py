"""Attention of a step's tokens over their window and the compressed entries that they may see, in the paged arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.compress import Compressor, Indexer, compress, index_scores
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.deepseek_v4.ops import rms, rotate, rotations
from flowinfer.engine.models.deepseek_v4.plan import Closing, Plan, Rows
from flowinfer.engine.models.linear import Projection
from flowinfer.kernels.paged_attention.invariant import sum_in_splits

WHOLE = 64  # entries come in multiples of so many where bytes mustn't depend on what runs beside
TOKENS_AT_ONCE = 256  # whose keys are gathered together: 16 MiB at 128 keys of 128 float32


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer. inverse: rotary frequencies of this layer's kind; out_a maps [T, groups, in] to rank each.

    split: as in kernels.paged_attention.Sizes, where bytes mustn't depend on what runs beside; 0: all keys in one sum.
    """

    q_a: Projection
    q_norm: Tensor
    q_b: Projection
    kv: Projection
    kv_norm: Tensor
    sinks_N: Tensor
    out_a: Projection
    out_b: Projection
    inverse: Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    rate: int
    split: int = 0


class Grouped:
    """A product a group: x [T, groups, in] and weight [groups, in, out] to [T, groups, out]."""

    def __init__(self, weight_GIO: Tensor) -> None:
        self.weight_GIO = weight_GIO

    def __call__(self, x_TGI: Tensor) -> Tensor:
        return torch.bmm(x_TGI.transpose(0, 1), self.weight_GIO).transpose(0, 1)


def attend(x_TH: Tensor, weights: Attention, sections: dict[str, Tensor], plan: Plan, config: V4Config) -> Tensor:
    """Writes the step's rows into the layer's sections, attends, returns [T, H]."""
    cos, sin = (part.unsqueeze(1) for part in rotations(plan.positions, weights.inverse))
    q_rank = rms(weights.q_a(x_TH), weights.q_norm, config.norm_eps)
    q = torch.unflatten(weights.q_b(q_rank), -1, (config.num_heads, config.head_dim))
    q = rotate(_unit(q, config.norm_eps), cos, sin)
    kv = rms(weights.kv(x_TH), weights.kv_norm, config.norm_eps)
    sections["window"][plan.own.blocks, plan.own.rows] = rotate(kv, cos[:, 0], sin[:, 0])
    chosen = _compressed(x_TH, q_rank, weights, sections, plan, config) if weights.compressor else None
    parts = []
    for start in range(0, len(q), TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        parts.append(_core(q[part], weights, sections, plan, part, chosen))
    out = rotate(torch.cat(parts), cos, -sin)  # values carry their key's rotation; taken back at the query's position
    grouped = out.reshape(len(out), config.o_groups, -1)
    return weights.out_b(weights.out_a(grouped).flatten(1))


def _unit(q: Tensor, eps: float) -> Tensor:
    return q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Entries that each token attends to: rows [T, K] and which of them count."""

    rows: Rows
    valid: Tensor


def _core(
    q_TND: Tensor, weights: Attention, sections: dict[str, Tensor], plan: Plan, part: slice, chosen: _Chosen | None
) -> Tensor:
    keys = sections["window"][plan.window.blocks[part], plan.window.rows[part]]
    valid = plan.in_window[part]
    if chosen is not None:
        entries = sections["entries"][chosen.rows.blocks[part], chosen.rows.rows[part]]
        keys, valid = torch.cat((keys, entries), 1), torch.cat((valid, chosen.valid[part]), 1)
    scores = torch.bmm(q_TND, keys.transpose(1, 2)).float() * q_TND.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    sinks = weights.sinks_N.view(1, -1, 1).expand(len(scores), -1, 1)
    # Sinks in front: behind, their place in the sum would change with the number of entries.
    shares = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:].to(keys.dtype)
    return sum_in_splits(shares, keys, weights.split) if weights.split else torch.bmm(shares, keys)


def _compressed(
    x_TH: Tensor, q_rank: Tensor, weights: Attention, sections: dict[str, Tensor], plan: Plan, config: V4Config
) -> _Chosen | None:
    """Adds this step's entries; None while there is none to see."""
    assert weights.compressor is not None
    closing = plan.closing[weights.rate, weights.compressor.slots]
    compress(x_TH, weights.compressor, sections["entries"], sections["tail"], closing)
    if weights.indexer is not None:
        compress(x_TH, weights.indexer.compressor, sections["index"], sections["index_tail"], closing)
    if not closing.most:
        return None
    if weights.indexer is None or closing.most <= config.index_topk:
        numbers = torch.arange(closing.most, device=x_TH.device).expand(len(x_TH), -1)
        valid = numbers < closing.visible.unsqueeze(1)
    else:
        numbers, valid = _pick(x_TH, q_rank, weights, sections["index"], plan, closing, config)
    if weights.split:
        missing = -numbers.shape[1] % WHOLE
        numbers, valid = F.pad(numbers, (0, missing)), F.pad(valid, (0, missing))
    return _Chosen(plan.entries(plan.sequence_T.unsqueeze(1), weights.rate, numbers), valid)


def _pick(
    x_TH: Tensor,
    q_rank: Tensor,
    weights: Attention,
    index: Tensor,
    plan: Plan,
    closing: Closing,
    config: V4Config,
) -> tuple[Tensor, Tensor]:
    """The index_topk best visible entries of each token, in order of position: [T, K] and which are visible."""
    indexer = weights.indexer
    assert indexer is not None
    cos, sin = (part.unsqueeze(1) for part in rotations(plan.positions, weights.inverse))
    q = rotate(torch.unflatten(indexer.query(q_rank), -1, (indexer.heads, config.index_dim)), cos, sin)
    weigh = indexer.weigh(x_TH).float() * indexer.heads**-0.5
    numbers = q.new_zeros((len(x_TH), config.index_topk), dtype=torch.int64)
    valid = numbers.bool()
    most = closing.most + (-closing.most % WHOLE if weights.split else 0)
    every = torch.arange(most, device=x_TH.device)
    there = every.clamp(max=closing.most - 1)
    for members, own in _alike(plan):
        rows = plan.entries(members.unsqueeze(1), weights.rate, there)
        scores = index_scores(q[own], index[rows.blocks, rows.rows], weigh[own])
        seen = every < closing.visible[own].unsqueeze(-1)
        # Stable: relu makes exact ties common, and which one wins must not depend on how many entries there are.
        ranked = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        best = ranked[..., : config.index_topk].sort(-1).values
        numbers[own], valid[own] = best, seen.gather(-1, best)
    return numbers, valid


def _alike(plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """Sequences with equally many tokens in this step, and those tokens [sequences, tokens]."""
    starts = plan.counts.cumsum() - plan.counts
    found = []
    for count in sorted(set(plan.counts.tolist())):
        members = (plan.counts == count).nonzero()[0]
        own = torch.from_numpy(starts[members]).unsqueeze(1) + torch.arange(count)
        device = plan.tables.device
        found.append((torch.from_numpy(members).to(device), own.to(device)))
    return found
