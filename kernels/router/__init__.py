"""DeepSeek-V4's choice of experts: by score and bias, or by a table of token ids; scores are sqrt(softplus(logits)).

One more choice, of weight 1, may stand behind the others: an expert that every token visits.

Dimensions: T tokens, E routed experts, K choices of a token, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.router.reference import choose_experts_reference

__all__ = ["choose_experts", "choose_experts_reference"]


def choose_experts(
    logits_TE: Tensor,
    top: int,
    *,
    scale: float,
    bias_E: Tensor | None = None,
    chosen_VK: Tensor | None = None,
    tokens_T: Tensor | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, top + shared], weights float32 alike): the best of score + bias, or the token's of the table.

    logits [T, E] of any float dtype, tokens any stride apart; bias_E float32; chosen int64 [V, top] and tokens int64
    [T] where a table decides. Weights are the chosen scores, without bias, brought to sum `scale`. Of equal ones the
    lowest expert wins. shared: expert E of weight 1 is added. Raises KernelUnsupported for sizes that don't fit.
    """
    from flowinfer.kernels.router.triton import launch

    tokens, num = logits_TE.shape
    if top > num or logits_TE.stride(1) != 1 or (chosen_VK is not None and chosen_VK.shape[1] != top):
        raise KernelUnsupported(f"router: can't choose {top} of rows of {list(logits_TE.shape)}.")
    if (chosen_VK is None) == (bias_E is None) or (chosen_VK is None) != (tokens_T is None):
        raise KernelUnsupported("router chooses by a bias, or by a table and tokens.")
    ids = torch.empty(tokens, top + shared, dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty(tokens, top + shared, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        launch(logits_TE, top, scale, bias_E, chosen_VK, tokens_T, ids, weights)
    return ids, weights
