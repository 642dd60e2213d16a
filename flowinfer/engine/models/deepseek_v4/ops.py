"""The arithmetic of the family that serving and training share: differentiable, whole tensors, no KV, no batch.

Dimensions: M streams, H hidden, D head size, E experts, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.config import Rotary

Product = Callable[[Tensor], Tensor]


def project(x: Tensor, weight: Tensor | Product) -> Tensor:
    """x W^T of a plain weight, or by whatever stands for it."""
    return F.linear(x, weight) if isinstance(weight, Tensor) else weight(x)


def sigmoid(x: Tensor) -> Tensor:
    """By tanh, whose vectorized form rounds as its scalar one: a number's place in a batch changes nothing."""
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32, back in x's dtype."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def frequencies(rope: Rotary, dim: int) -> Tensor:
    """float32 [dim / 2]; YaRN (Peng et al., 2023) keeps short waves and stretches long ones by factor."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not rope.factor:
        return plain

    def turns_at(rotations: float) -> float:
        return dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(turns_at(rope.beta_fast)), 0)
    high = min(math.ceil(turns_at(rope.beta_slow)), dim - 1)
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def rotations(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [..., rope / 2] of int positions [...]."""
    angles = positions.float().unsqueeze(-1) * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the last 2 * cos.shape[-1] channels, in neighbouring pairs; cos and sin broadcast against x."""
    turned = 2 * cos.shape[-1]
    even, odd = torch.unflatten(x[..., -turned:].float(), -1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-turned], pairs.to(x.dtype)), -1)


def stream_weights(
    x_MH: Tensor,
    fn: Tensor | Product,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    normalise: Callable[[Tensor, int, float], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Manifold-constrained hyper-connection: pre [..., M], post [..., M] and doubly stochastic comb [..., M, M].

    normalise: another way to compute `sinkhorn`.
    """
    streams = x_MH.shape[-2]
    mixed = project(rms(x_MH.flatten(-2).float(), None, norm_eps), fn)
    pre, post, comb = mixed.split_with_sizes((streams, streams, streams * streams), -1)
    pre_base, post_base, comb_base = base.split_with_sizes((streams, streams, streams * streams))
    pre = sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * sigmoid(post * scale[1] + post_base)
    comb = torch.unflatten(comb * scale[2] + comb_base, -1, (streams, streams)).softmax(-1) + eps
    return pre, post, (normalise or sinkhorn)(comb, iterations, eps)


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Matrices [..., M, M] whose columns, then rows and columns in turn are brought to sum 1."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def merge(x_MH: Tensor, pre: Tensor) -> Tensor:
    """What a block reads: the streams, weighted, [..., H]."""
    return (pre.unsqueeze(-1) * x_MH).sum(-2).to(x_MH.dtype)


def spread(x_MH: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a block: its output spread over them, plus the streams mixed by comb transposed."""
    dtype = x_MH.dtype
    return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + comb.to(dtype).transpose(-1, -2) @ x_MH


def head_streams(
    x_MH: Tensor, fn: Tensor | Product, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """The streams collapsed to [..., H] before the last norm."""
    mixed = project(rms(x_MH.flatten(-2).float(), None, norm_eps), fn)
    return merge(x_MH, sigmoid(mixed * scale + base) + eps)


def pool(values: Tensor, gates: Tensor) -> Tensor:
    """Compressed entries: values [..., slots, D] averaged by a softmax over slots of gates, a channel each."""
    # Slots last: over a dimension in front, softmax rounds by how many entries there are.
    shares = gates.transpose(-1, -2).softmax(-1, dtype=torch.float32).transpose(-1, -2)
    return (values * shares.contiguous().to(values.dtype)).sum(-2)


def router_scores(x: Tensor, weight: Tensor | Product) -> Tensor:
    """sqrt(softplus) of the router's products, float32 [T, E]; in parts, see sigmoid."""
    logits = project(x, weight).float()
    return torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp(max=20)))).sqrt()


def expert_weights(scores_TE: Tensor, experts_TK: Tensor, scale: float) -> Tensor:
    """Scores of the chosen experts, to sum `scale`; a bias may have chosen them but doesn't weigh them."""
    chosen = scores_TE.gather(-1, experts_TK)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def gated(gate: Tensor, up: Tensor, limit: float, silu: Product = F.silu) -> Tensor:
    """silu(gate) * up, both clamped (gate only from above)."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
