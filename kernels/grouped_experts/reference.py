"""The meaning of the layout by blocks, in plain torch, and of the products over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def lay_out_reference(ids_TK: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """As lay_out: (place int32 [P], owner of each block that has rows, counts int32 [E])."""
    chosen = ids_TK.flatten().long()
    counts = torch.bincount(chosen, minlength=num_experts)
    blocks = (counts + block_rows - 1) // block_rows
    starts = (blocks.cumsum(0) - blocks) * block_rows
    order = chosen.argsort(stable=True)
    among = torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts)[chosen[order]]
    place = torch.empty_like(order)
    place[order] = starts[chosen[order]] + among
    owner = torch.repeat_interleave(torch.arange(num_experts, device=chosen.device), blocks)
    return place.int(), owner.int(), counts.int()


def gated_rows_reference(x_TH: Tensor, ids_TK: Tensor, gate_up_EOH: Tensor) -> Tensor:
    """[P, I]: silu(gate) * up of each pair, in pair order and in the dtype of its arguments."""
    pairs = x_TH.repeat_interleave(ids_TK.shape[1], 0)
    out = x_TH.new_empty(len(pairs), gate_up_EOH.shape[1] // 2)
    for expert in ids_TK.unique().tolist():
        mine = ids_TK.flatten() == expert
        gate, up = F.linear(pairs[mine], gate_up_EOH[expert]).chunk(2, -1)
        out[mine] = F.silu(gate) * up
    return out


def down_rows_reference(h_PI: Tensor, ids_TK: Tensor, down_EHI: Tensor) -> Tensor:
    """[P, H]: down_e h of each pair, unweighted, in pair order."""
    out = h_PI.new_empty(len(h_PI), down_EHI.shape[1])
    for expert in ids_TK.unique().tolist():
        mine = ids_TK.flatten() == expert
        out[mine] = F.linear(h_PI[mine], down_EHI[expert])
    return out
