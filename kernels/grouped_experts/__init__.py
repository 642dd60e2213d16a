"""The products of an expert layer over many tokens on Hopper: rows are gathered as they load, the gate is fused in.

Rows lie in blocks, each of one expert: pairs of expert 0, filled up to a whole block, then those of expert 1 and so on.
What fills up is computed and read by nobody. Leaves routing, the weighted sum and small batches to kernels/experts.

Dimensions: T tokens, H hidden, E experts, I width of an expert, P = T * top pairs, R rows in blocks.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.grouped_experts.reference import down_rows_reference, gated_rows_reference, lay_out_reference

if TYPE_CHECKING:
    from flowinfer.kernels.grouped_experts.products import Products

__all__ = [
    "Blocks", "down_rows", "down_rows_reference", "fits", "gated_rows", "gated_rows_reference", "lay_out",
    "lay_out_reference", "prepare", "ready",
]  # fmt: skip

log = logging.getLogger(__name__)

BLOCK_ROWS = 128  # of a tile of the products


class Blocks(NamedTuple):
    """place int32 [P]: row of each pair. tokens int32 [R]: token of each row, 0 where nothing lies.

    owner int32 [R / block]: expert of each block; num_blocks int32 [1]: blocks with rows. counts int32 [E].
    """

    place: Tensor
    tokens: Tensor
    owner: Tensor
    num_blocks: Tensor
    counts: Tensor


def fits(hidden: int, width: int) -> bool:
    """Whether an expert of these sizes falls into whole tiles, of at least four steps each."""
    return hidden % 256 == 0 and width % 128 == 0 and width >= 256


def lay_out(ids_TK: Tensor, num_experts: int, *, block_rows: int = BLOCK_ROWS) -> Blocks:
    """Gives each pair its row: by expert, then in the order of pairs. ids int32 [T, top], contiguous."""
    from flowinfer.kernels.grouped_experts.triton import CHUNK, launch_lay_out

    if ids_TK.dtype is not torch.int32 or not ids_TK.is_contiguous() or not ids_TK.numel():
        raise KernelUnsupported("grouped_experts lays out contiguous int32 ids of at least one token.")
    num_pairs = ids_TK.numel()
    most_blocks = min(num_pairs, num_experts + num_pairs // block_rows)
    most_blocks += most_blocks % 2  # as programs work in pairs

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TK.device)

    made = Blocks(
        place=empty(num_pairs), tokens=torch.zeros(most_blocks * block_rows, dtype=torch.int32, device=ids_TK.device),
        owner=empty(most_blocks), num_blocks=empty(1), counts=empty(num_experts),
    )  # fmt: skip
    chunk_counts = empty((num_pairs + CHUNK - 1) // CHUNK, num_experts)
    launch_lay_out(
        ids_TK, ids_TK.shape[1], made.counts, chunk_counts, made.place, made.tokens, made.owner, made.num_blocks,
        block_rows,
    )  # fmt: skip
    return made


def gated_rows(x_TH: Tensor, gate_up_EOH: Tensor, blocks: Blocks) -> Tensor:
    """[R, I]: silu(gate) * up of each row's token by its expert; gate_up [E, 2 I, H]. bf16, sums in float32."""
    num_experts, width, hidden = gate_up_EOH.shape
    _check(x_TH, gate_up_EOH, hidden, width // 2)
    out = x_TH.new_empty(len(blocks.tokens), width // 2)
    prepare(hidden, width // 2, num_experts).gated(x_TH, gate_up_EOH, out, blocks)
    return out


def down_rows(h_RI: Tensor, down_EHI: Tensor, blocks: Blocks) -> Tensor:
    """[R, H]: down_e h of each row, unweighted. bf16, sums in float32."""
    num_experts, hidden, width = down_EHI.shape
    _check(h_RI, down_EHI, hidden, width)
    if len(h_RI) != len(blocks.tokens):
        raise KernelUnsupported(f"grouped_experts: {len(h_RI)} rows aren't the {len(blocks.tokens)} of the blocks.")
    out = h_RI.new_empty(len(h_RI), hidden)
    prepare(hidden, width, num_experts).down(h_RI, down_EHI, out, blocks)
    return out


@lru_cache
def prepare(hidden: int, width: int, num_experts: int) -> Products:
    """Compiles both products for these sizes (about a second); kept for the life of the process."""
    from flowinfer.kernels.grouped_experts.products import Products

    return Products(hidden, width, num_experts)


@lru_cache
def ready(hidden: int, width: int, num_experts: int) -> bool:
    """Compiles both, and says whether that went well; where it didn't, the reason is logged once."""
    try:
        prepare(hidden, width, num_experts)
    except Exception as error:  # the compiler is another's: its errors have no base but this
        log.warning("grouped_experts can't be had, torch's grouped product runs instead: %s", error)
        return False
    return True


def _check(rows: Tensor, weights: Tensor, hidden: int, width: int) -> None:
    if rows.dtype is not torch.bfloat16 or weights.dtype is not torch.bfloat16:
        raise KernelUnsupported(f"grouped_experts multiplies bfloat16, not {rows.dtype} and {weights.dtype}.")
    if not fits(hidden, width) or rows.shape[1] != weights.shape[2]:
        raise KernelUnsupported(
            f"grouped_experts: rows of {rows.shape[1]} and weights {list(weights.shape)} don't fall into whole tiles.",
            help="The hidden size must be a multiple of 256, an expert's width one of 128 and at least 256.",
        )
    if not rows.is_contiguous() or not weights.is_contiguous():
        raise KernelUnsupported("grouped_experts needs contiguous rows and weights.")
