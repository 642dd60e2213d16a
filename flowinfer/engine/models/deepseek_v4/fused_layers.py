"""Weights of a DeepSeek-V4 layer as its kernels take them: products over the same rows joined, experts stacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.attention import Attention, Grouped
from flowinfer.engine.models.deepseek_v4.compress import Compressor
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.deepseek_v4.experts import Experts
from flowinfer.engine.models.deepseek_v4.model import Hyper, Layer
from flowinfer.engine.models.linear import Linear, Projection
from flowinfer.kernels.compressor import Pool

Mixing = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """first: of what reads the hidden rows (query rank, key, compressor, the indexer's, its weights), sizes its parts.

    second: of what reads the query rank: queries, and the indexer's. out_a [groups, out, in]; gate_up [E + 1, 2 I, H]
    and down [E + 1, H, I], the shared expert last. load int32 [E], where rows of experts are counted.
    """

    attention_hyper: Mixing
    attention_norm: Tensor
    first: Tensor
    sizes: list[int]
    q_norm: Tensor
    second: Tensor
    kv_norm: Tensor
    sinks: Tensor
    out_a: Tensor
    out_b: Tensor
    pools: list[Pool]
    rate: int
    indexed: bool
    ffn_hyper: Mixing
    ffn_norm: Tensor
    router: Tensor
    bias: Tensor | None
    table: Tensor | None
    gate_up: Tensor
    down: Tensor
    load: Tensor | None

    @property
    def products(self) -> list[Tensor]:
        """Weights [out, in] of its plain products."""
        return [self.first, self.second, self.out_a[0], self.out_b, self.router]


def pack(layer: Layer, config: V4Config) -> FusedLayer:
    """A layer whose projections are plain."""
    attention, ffn = layer.attention, layer.ffn
    firsts, seconds = _readers(attention)
    gate_up, down = _stacked(ffn)
    assert isinstance(attention.out_a, Grouped), "the loader leaves grouped products plain for this model"
    return FusedLayer(
        attention_hyper=_mixing(layer.attention_hyper),
        attention_norm=layer.attention_norm,
        first=torch.cat(firsts),
        sizes=[len(weight) for weight in firsts],
        q_norm=attention.q_norm,
        second=torch.cat(seconds),
        kv_norm=attention.kv_norm,
        sinks=attention.sinks_N,
        out_a=attention.out_a.weight_GIO.transpose(1, 2).contiguous(),
        out_b=plain(attention.out_b),
        pools=[_pool(part, config) for part in _compressors(attention)],
        rate=attention.rate,
        indexed=attention.indexer is not None,
        ffn_hyper=_mixing(layer.ffn_hyper),
        ffn_norm=layer.ffn_norm,
        router=ffn.gate_EH if isinstance(ffn.gate_EH, Tensor) else plain(ffn.gate_EH),
        bias=ffn.bias_E,
        table=ffn.chosen_VK,
        gate_up=gate_up,
        down=down,
        load=ffn.load_E,
    )


def plain(projection: Projection) -> Tensor:
    """The weight [out, in] of a product without a bias."""
    assert isinstance(projection, Linear) and projection.bias_O is None, "projections on a GPU are plain"
    return projection.weight_OI


def _compressors(attention: Attention) -> list[Compressor]:
    found = [attention.compressor] if attention.compressor else []
    return found + ([attention.indexer.compressor] if attention.indexer else [])


def _readers(attention: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """Weights that read the hidden rows, and those that read the query rank."""
    firsts = [attention.q_a, attention.kv, *(part.project for part in _compressors(attention))]
    seconds = [attention.q_b]
    if attention.indexer:
        firsts.append(attention.indexer.weigh)
        seconds.append(attention.indexer.query)
    return [plain(part) for part in firsts], [plain(part) for part in seconds]


def _pool(part: Compressor, config: V4Config) -> Pool:
    return Pool(part.bias.contiguous(), part.norm_D, config.norm_eps)


def _mixing(hyper: Hyper) -> Mixing:
    assert isinstance(hyper.fn, Tensor), "the loader leaves mixing weights plain for this model"
    return hyper.fn.contiguous(), hyper.base, hyper.scale


def _stacked(ffn: Experts) -> tuple[Tensor, Tensor]:
    experts = [*ffn.routed, ffn.shared]
    return (
        torch.stack([plain(expert.gate_up) for expert in experts]),
        torch.stack([plain(expert.down) for expert in experts]),
    )
