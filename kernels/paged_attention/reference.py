"""Attention over paged keys and values in plain torch, one sequence at a time: the meaning of the op."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32s = npt.NDArray[np.int32]


def paged_attention_reference(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: Tensor,
    layer: int,
    query_starts: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
) -> Tensor:
    """Writes K and V of the step into kv, then attends; returns [T, N * D]. Arguments as in plan_attention."""
    group = q_TND.shape[1] // k_TKD.shape[1]
    kv = kv.view(*kv.shape[:3], k_TKD.shape[1], -1, k_TKD.shape[2])  # heads first inside a block
    block_tokens = kv.shape[4]
    outs = []
    for s, kv_len in enumerate(kv_lens.tolist()):
        start, end = int(query_starts[s]), int(query_starts[s + 1])
        first = kv_len - (end - start)
        for t in range(start, end):
            block, offset = divmod(first + t - start, block_tokens)
            kv[block_tables[s, block], layer, 0, :, offset] = k_TKD[t]
            kv[block_tables[s, block], layer, 1, :, offset] = v_TKD[t]
        blocks = torch.as_tensor(block_tables[s, : -(-kv_len // block_tokens)]).long()
        k, v = (
            kv[blocks, layer, i].transpose(1, 2).flatten(0, 1)[:kv_len].float().repeat_interleave(group, 1)
            for i in (0, 1)
        )
        scores = torch.einsum("tnd,lnd->ntl", q_TND[start:end].float(), k) * q_TND.shape[2] ** -0.5
        key = torch.arange(kv_len, device=q_TND.device)
        future = key > key[first:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outs.append(torch.einsum("ntl,lnd->tnd", weights, v).flatten(1))
    return torch.cat(outs).to(q_TND.dtype)
