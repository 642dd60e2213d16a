"""Log-probabilities as the API reports them: of the raw logits at temperature 1, before bias, penalties and filters."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from flowinfer.kernels.sampling import top_tokens
from flowinfer.message import TokenLogprob


def token_logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Natural log-probability of `token` and of the num_top best, by falling probability, ties by id.

    logits_V: float32 [vocab]. The normalizer is summed in float64.
    """
    row = logits_V.detach().cpu().numpy()
    peak = row.max()
    normalizer = float(peak) + math.log(np.exp(row - peak).sum(dtype=np.float64))
    top: list[tuple[int, float]] = []
    if num_top > 0:
        tokens = top_tokens(row, min(num_top, row.size))
        best = tokens[np.argsort(-row[tokens], kind="stable")][:num_top]
        top = [(int(t), float(row[t]) - normalizer) for t in best]
    return TokenLogprob(token, float(row[token]) - normalizer, top)
