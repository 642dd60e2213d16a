"""Causal attention of a step's tokens over keys and values in arena blocks, which it writes first.

The arena is [blocks, layers, 2 (K, V), block_tokens, K heads, D]. Seen as rows of K * D numbers, the rows of one layer
lie at a fixed offset from those of layer 0, so the plan's row numbers serve every layer. Knows nothing of scheduling.

Dimensions: T tokens, N query heads, K kv heads, G = N / K, D head size, B sequences, Q queries each, L keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.paged_attention.plan import AttentionPlan, Group, plan_attention
from flowinfer.kernels.paged_attention.reference import paged_attention_reference

__all__ = ["AttentionPlan", "paged_attention", "paged_attention_reference", "plan_attention"]


def paged_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """Writes the step's K and V into the layer's part of kv, attends, returns [T, N * D] in q's dtype.

    Scores are scaled by D ** -0.5; softmax is float32. Raises KernelUnsupported where q and kv differ in dtype.
    """
    if q_TND.dtype is not kv.dtype:
        raise KernelUnsupported(f"paged_attention over {kv.dtype} KV needs {kv.dtype} queries, got {q_TND.dtype}.")
    rows = _rows_of(kv, layer)
    rows[plan.write_rows] = torch.stack((k_TKD.flatten(1), v_TKD.flatten(1)), 1)
    if len(plan.groups) == 1:
        return _attend(plan.groups[0], q_TND, k_TKD, v_TKD, rows)
    out = q_TND.new_empty(q_TND.shape[0], q_TND.shape[1] * q_TND.shape[2])
    for group in plan.groups:
        own = group.tokens
        out[own] = _attend(group, q_TND[own], k_TKD[own], v_TKD[own], rows)
    return out


def _rows_of(kv: Tensor, layer: int) -> Tensor:
    """[rows, K * D] from the layer's first row on, so that row numbers of layer 0 mean the same place in this layer."""
    _, _, _, block_tokens, kv_heads, head_dim = kv.shape
    return kv.view(-1, kv_heads * head_dim)[layer * 2 * block_tokens :]


def _attend(group: Group, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    if group.rows is None:
        return _attend_own(q, k, v)
    return _attend_paged(group, group.rows, q, rows, kv_heads=k.shape[1])


def _attend_own(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """A whole prompt in one step: nothing to gather. Kv heads stand as the batch, so K and V are never repeated."""
    tokens, heads, head_dim = q_TND.shape
    group = heads // k_TKD.shape[1]
    q = q_TND.view(tokens, -1, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k_TKD, v_TKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def _attend_paged(group: Group, read: Tensor, q_TND: Tensor, rows: Tensor, *, kv_heads: int) -> Tensor:
    """B sequences at once: the G query heads of a kv head are folded into the queries."""
    tokens, heads, head_dim = q_TND.shape
    batch, queries = group.num_sequences, group.num_queries
    kv = rows.index_select(0, read).view(2, batch, -1, kv_heads, head_dim).transpose(2, 3)
    q = q_TND.reshape(batch, queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    out = F.scaled_dot_product_attention(q.flatten(2, 3), kv[0], kv[1], attn_mask=group.bias)
    out = out.view(batch, kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(tokens, heads * head_dim)
