"""Sampling in plain torch over all rows at once, any device: the spec that `host.py` is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.kernels.sampling.noise import GOLDEN32, LANES

_LOW = 0xFFFFFFFF


def filtered(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Logits over temperature, -inf where a filter drops the token. float32 [rows, vocab].

    Filters in this order, each over the distribution that the one before left: min-p, top-k, top-p. Ties with the k-th
    best stay. The best token always stays.
    """
    scaled = logits_RV * (1 / temperature_R).unsqueeze(1)
    peak = scaled.amax(1, keepdim=True)
    scaled = scaled.masked_fill(scaled < peak + min_p_R.log().unsqueeze(1), -torch.inf)
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    vocab = scaled.shape[1]
    last = torch.where(top_k_R > 0, top_k_R.clamp(max=vocab), vocab) - 1
    least = ordered.gather(1, last.long().unsqueeze(1))
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    weights = (ordered.double() - peak.double()).exp()
    before = weights.cumsum(1) - weights
    drop = (before >= top_p_R.double().unsqueeze(1) * weights.sum(1, keepdim=True)) & (top_p_R < 1).unsqueeze(1)
    drop[:, 0] = False
    return torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(drop, -torch.inf))


def exponentials(keys_R: Tensor, vocab: int) -> Tensor:
    """Exponential noise of every token, float64 [rows, vocab]. keys_R: int64, the bits of the uint64 keys."""
    spread = (torch.arange(vocab, device=keys_R.device) * GOLDEN32) & _LOW
    high = _lane(keys_R, spread, 0).double()
    low = _lane(keys_R, spread, 1).double()
    return -torch.log1p(-((high * 2.0**32 + low + 0.5) * 2.0**-64))


def _lane(keys_R: Tensor, spread_V: Tensor, lane: int) -> Tensor:
    first, second, shift = LANES[lane]
    halves = (keys_R & _LOW).unsqueeze(1), ((keys_R >> 32) & _LOW).unsqueeze(1)
    low, high = (halves[1], halves[0]) if lane else halves
    x = spread_V ^ low
    x = ((x ^ (x >> 16)) * first & _LOW) ^ high
    x = (x ^ (x >> shift)) * second & _LOW
    return x ^ (x >> 16)


def sample(scaled_RV: Tensor, keys_R: Tensor) -> Tensor:
    """Token of each row, int64 [rows]: argmax of s_i - log E_i, the Gumbel-max trick with the hashed noise."""
    return (scaled_RV.double() - exponentials(keys_R, scaled_RV.shape[1]).log()).argmax(1)
