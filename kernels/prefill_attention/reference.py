"""The meaning of prefill_attention, in plain torch, a sequence at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowinfer.kernels.rope import Heads

Int32s = npt.NDArray[np.int32]


def prefill_attention_reference(
    q_TND: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    query_starts: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
    *,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """As prefill_attention, with the host's arrays for the tiling."""
    n, k, _ = heads
    outs = []
    for s, length in enumerate(kv_lens.tolist()):
        q = q_TND[int(query_starts[s]) : int(query_starts[s + 1]), :n]
        blocks = torch.as_tensor(block_tables[s, : -(-length // kv.shape[4])]).long()
        keys, values = (
            kv[blocks, layer, i].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(n // k, 1).to(q.dtype)
            for i in (0, 1)
        )
        scores = torch.einsum("tnd,lnd->ntl", q, keys) * q.shape[2] ** -0.5
        key = torch.arange(length, device=q.device)
        at = key[length - len(q) :, None]
        hidden = (key > at) | ((key <= at - window) if window else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks_N is not None:
            sink = sinks_N.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sink), 2)
        weights = scores.softmax(-1)[..., :length]
        outs.append(torch.einsum("ntl,lnd->tnd", weights, values).flatten(1))
    return torch.cat(outs)
