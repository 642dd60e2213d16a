"""The lightning indexer: which compressed entries each token attends to, by a weighted sum of relu(q . k) over heads.

DeepSeek-V4 (arXiv 2606.19348), as DeepSeek-V3.2 before it. Scores are made tile by tile into memory, for tokens that
see more entries than they may choose. The best are found by their numbers' bits, eight at a time from the top (radix
select): four counts over the scores and one pass that writes the chosen in order of position, no sort. Of equal scores
the earlier entry wins, so the answer is defined, and a stable sort gives the same.

Dimensions: T tokens, H index heads, D index size, K entries that a token may choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.indexer_topk.reference import index_scores_reference, indexer_topk_reference
from flowinfer.kernels.token_rows import TokenRows

__all__ = ["index_scores_reference", "indexer_topk", "indexer_topk_reference"]

SCORE_BYTES = 256 << 20  # of scores in memory at once: tokens come in parts of so many


def indexer_topk(q_THD: Tensor, weights_TH: Tensor, keys: Tensor, rows: TokenRows, *, rate: int, top: int) -> Tensor:
    """int32 [T, top]: numbers of the chosen entries, ascending; -1 behind the last where a token sees fewer.

    q [T, H, D], rotated, its last two dimensions contiguous; weights [T, H] of any float dtype; keys [blocks,
    block_tokens / rate, D], a section of the arena, of q's dtype, whose entries of this step are written. A token at
    position p sees entries below (p + 1) // rate. Scores are float32: the sum over heads of weight * relu(q . k) *
    D^-0.5. Nothing waits for the device, and sizes hang on the tables alone: a CUDA graph can hold it.
    Raises KernelUnsupported for dtypes, strides or sizes that don't fit.
    """
    from flowinfer.kernels.indexer_topk.triton import launch_choose, launch_scores

    tokens, heads, size = q_THD.shape
    if q_THD.dtype != keys.dtype:
        raise KernelUnsupported(f"indexer_topk: queries {q_THD.dtype} and keys {keys.dtype} must agree.")
    if q_THD.stride()[1:] != (size, 1) or keys.stride()[1:] != (size, 1) or weights_TH.stride(1) != 1:
        raise KernelUnsupported("indexer_topk needs contiguous heads, entries and weights of a token.")
    if keys.shape[1] != rows.block_tokens // rate or weights_TH.shape != (tokens, heads):
        raise KernelUnsupported(
            f"indexer_topk: {list(q_THD.shape)}, {list(weights_TH.shape)} and {list(keys.shape)} don't fit at {rate} "
            f"tokens an entry and {rows.block_tokens} a block."
        )
    chosen = torch.empty(tokens, top, dtype=torch.int32, device=q_THD.device)
    most = rows.most_tokens // rate
    each = max(1, SCORE_BYTES // (4 * max(1, most)))
    for first in range(0, tokens, each):
        part = slice(first, first + each)
        own = rows.part(part)
        scores = q_THD.new_empty(len(own.slots), most if most > top else 0, dtype=torch.float32)
        if most > top:
            launch_scores(q_THD[part], weights_TH[part], keys, own, rate, top, scores)
        launch_choose(scores, own, rate, chosen[part])
    return chosen
