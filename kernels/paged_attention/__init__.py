"""Causal attention of a step's tokens over keys and values in arena blocks, which it writes first.

The arena is seen as pages, and the pages of one layer lie at a fixed offset from those of layer 0, so the numbers in a
plan serve every layer. Knows nothing of scheduling.

Dimensions: T tokens, N query heads, K kv heads, G = N / K, D head size, B sequences, Q queries each, L keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.paged_attention.invariant import Sizes, attend_in_splits
from flowinfer.kernels.paged_attention.plan import AttentionPlan, Group, plan_attention
from flowinfer.kernels.paged_attention.reference import paged_attention_reference

__all__ = [
    "AttentionPlan",
    "Sizes",
    "paged_attention",
    "paged_attention_reference",
    "plan_attention",
    "wipe_fresh_blocks",
]

FLASH_ROWS = 12  # B * K products up to which torch's flash kernel beats two batched products in bf16 on CPU
FLASH_QUERIES = 48  # and G * Q from which it does so again


def paged_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """Writes the step's K and V into the layer's part of kv, attends, returns [T, N * D] in q's dtype.

    Scores are scaled by D ** -0.5; softmax is float32. `wipe_fresh_blocks` must have run once for the plan. Raises
    KernelUnsupported where q and kv differ in dtype.
    """
    if q_TND.dtype is not kv.dtype:
        raise KernelUnsupported(f"paged_attention over {kv.dtype} KV needs {kv.dtype} queries, got {q_TND.dtype}.")
    num_kv_heads, head_dim = k_TKD.shape[1:]
    pages = kv.view(-1, plan.block_tokens * head_dim)[layer * 2 * num_kv_heads :]
    pages.view(-1, head_dim)[plan.write_rows] = torch.stack((k_TKD, v_TKD), 1)
    if len(plan.groups) == 1:
        return _attend(plan.groups[0], q_TND, k_TKD, v_TKD, pages, plan.sizes)
    out = q_TND.new_empty(q_TND.shape[0], q_TND.shape[1] * q_TND.shape[2])
    for group in plan.groups:
        own = group.tokens
        out[own] = _attend(group, q_TND[own], k_TKD[own], v_TKD[own], pages, plan.sizes)
    return out


def wipe_fresh_blocks(kv: Tensor, plan: AttentionPlan) -> None:
    """Zeroes the blocks that this step begins, in all layers, before any layer writes."""
    if plan.fresh_blocks is not None:
        kv[plan.fresh_blocks] = 0


def _attend(group: Group, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, sizes: Sizes | None) -> Tensor:
    if group.pages is None:
        return _attend_own(q, k, v)
    return _attend_paged(group, group.pages, q, pages, num_kv_heads=k.shape[1], sizes=sizes)


def _attend_own(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """A whole prompt in one step: nothing to gather. Kv heads stand as the batch, so K and V are never repeated."""
    tokens, heads, head_dim = q_TND.shape
    group = heads // k_TKD.shape[1]
    q = q_TND.view(tokens, -1, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k_TKD, v_TKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    merged: Tensor = out.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)
    return merged


def _attend_paged(
    group: Group, read: Tensor, q_TND: Tensor, pages: Tensor, *, num_kv_heads: int, sizes: Sizes | None
) -> Tensor:
    """B sequences at once: the G query heads of a kv head are folded into the queries."""
    tokens, heads, head_dim = q_TND.shape
    batch, queries = group.num_sequences, group.num_queries
    k, v = pages.index_select(0, read).view(2, batch, num_kv_heads, -1, head_dim)
    q = q_TND.reshape(batch, queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if sizes is not None:
        out = attend_in_splits(q, k, v, attn_mask=group.bias, sizes=sizes)
    else:
        attend = _two_products if _products_win(q) else F.scaled_dot_product_attention
        out = attend(q, k, v, attn_mask=group.bias)
    out = out.view(batch, num_kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(tokens, heads * head_dim)


def _products_win(q: Tensor) -> bool:
    batch, num_kv_heads, rows, _ = q.shape
    small = batch * num_kv_heads <= FLASH_ROWS or rows >= FLASH_QUERIES
    return q.device.type == "cpu" and q.dtype is torch.bfloat16 and not small


def _two_products(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None) -> Tensor:
    """The textbook form. With few queries a head, batched products use the cores better than a tiled kernel does."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if attn_mask is not None:
        scores += attn_mask
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
