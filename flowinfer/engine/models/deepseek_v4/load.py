"""Builds a V4Model from a checkpoint: the original names, with or without the prefix that transformers writes."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.formats import SCALES, weight_format
from flowinfer.engine.models.deepseek_v4.attention import Attention, Grouped
from flowinfer.engine.models.deepseek_v4.compress import Compressor, Indexer
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.deepseek_v4.experts import Expert, Experts
from flowinfer.engine.models.deepseek_v4.model import Hyper, Layer, V4Model
from flowinfer.engine.models.deepseek_v4.ops import frequencies
from flowinfer.engine.models.deepseek_v4.quant import dequantize
from flowinfer.engine.models.invariant import Invariance
from flowinfer.engine.models.linear import Make, Projection, make_linear
from flowinfer.engine.models.moe import zero_load
from flowinfer.engine.models.quantized import Makers
from flowinfer.engine.weights import Weights, info_of
from flowinfer.errors import ModelError

_IGNORED = re.compile(r"(model\.)?mtp\.")  # draft layers of the release, which have a place of their own


def build(
    config: V4Config,
    weights: Weights,
    progress: Callable[[int, int], None] | None,
    invariance: Invariance | None = None,
    own: Makers | None = None,
) -> V4Model:
    """The model of an open checkpoint. Raises ModelError naming a missing, misshapen or unknown tensor."""
    fused = _can_fuse(weights.device, weights.dtype)
    if invariance is not None and weights.device.type != "cpu" and not fused:
        raise ModelError(
            f"batch_invariant on {weights.device} needs Triton's kernels, which don't run there.",
            help="`flowinfer doctor` says why. Use `device: cpu`, or leave batch_invariant out.",
        )
    if fused:  # its kernels keep the mode by themselves: parts stay plain
        return _Loader(config, weights, None, None).fused(progress, invariant=invariance is not None)
    return _Loader(config, weights, invariance, own).model(progress)


def _can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    from flowinfer.kernels.arch import has_triton

    if not has_triton():
        return False
    from flowinfer.engine.models.deepseek_v4.fused import can_fuse

    return can_fuse(device, dtype)


class _Loader:
    def __init__(
        self, config: V4Config, weights: Weights, invariance: Invariance | None, own: Makers | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.invariance = invariance
        self.make: Make = make_linear if invariance is None else invariance.linear  # compressors and indexer: as stored
        self.pack, self.make_head = own or Makers(self.make, self.make)
        self.main = frequencies(config.main_rope, config.rope_dim).to(weights.device)
        self.wide = frequencies(config.compress_rope, config.rope_dim).to(weights.device)
        self.load_LE = zero_load(config, weights.device)

    def model(self, progress: Callable[[int, int], None] | None) -> V4Model:
        model = V4Model(*self.parts(progress))
        model.expert_load_LE = self.load_LE
        return model

    def fused(self, progress: Callable[[int, int], None] | None, *, invariant: bool) -> V4Model:
        from flowinfer.engine.models.deepseek_v4.fused import FusedV4

        model = FusedV4(*self.parts(progress), inverses=(self.main, self.wide), invariant=invariant)
        model.expert_load_LE = self.load_LE
        return model

    def parts(
        self, progress: Callable[[int, int], None] | None
    ) -> tuple[V4Config, Tensor, list[Layer], Hyper, Tensor, Projection]:
        """What a V4Model is made of."""
        config, hidden = self.config, self.config.hidden_size
        embed = self.matrix(self.either("embed.weight", "embed_tokens.weight"), config.vocab_size, hidden)
        layers = []
        for index in range(config.num_layers):
            layers.append(self.layer(index))
            if progress:
                progress(index + 1, config.num_layers)
        head = embed if config.tied_embeddings else self.matrix("head", config.vocab_size, hidden)
        hyper = [self.either(f"hc_head_{part}", f"hc_head.hc_{part}") for part in ("fn", "base", "scale")]
        wide = config.streams * hidden
        shapes = ((config.streams, wide), (config.streams,), (1,))
        collapse = self.mixing(*(self.exact(name, shape) for name, shape in zip(hyper, shapes, strict=True)))
        norm = self.exact("norm.weight", (hidden,))
        self.weights.finish(ignore=("head.weight",) if config.tied_embeddings else (), skip=_IGNORED)
        return config, embed, layers, collapse, norm, self.make_head(head, None)

    def layer(self, index: int) -> Layer:
        hidden, name = self.config.hidden_size, f"layers.{index}."
        return Layer(
            attention_hyper=self.hyper(f"{name}hc_attn"),
            attention_norm=self.exact(f"{name}attn_norm.weight", (hidden,)),
            attention=self.attention(index, f"{name}attn."),
            ffn_hyper=self.hyper(f"{name}hc_ffn"),
            ffn_norm=self.exact(f"{name}ffn_norm.weight", (hidden,)),
            ffn=self.experts(index, f"{name}ffn."),
        )

    def hyper(self, name: str) -> Hyper:
        streams = self.config.streams
        mixes = (2 + streams) * streams
        return self.mixing(
            self.exact(f"{name}_fn", (mixes, streams * self.config.hidden_size)),
            self.exact(f"{name}_base", (mixes,)),
            self.exact(f"{name}_scale", (3,)),
        )

    def mixing(self, fn: Tensor, base: Tensor, scale: Tensor) -> Hyper:
        return Hyper(fn if self.invariance is None else self.invariance.linear(fn), base, scale)

    def attention(self, index: int, name: str) -> Attention:
        c = self.config
        heads, rate, sparse = c.num_heads * c.head_dim, c.rates[index], index in c.sparse_layers
        out_a = self.matrix(f"{name}wo_a", c.o_groups * c.o_rank, heads // c.o_groups)
        indexer = None
        if sparse:
            indexer = Indexer(
                self.compressor(f"{name}indexer.compressor.", rate, c.index_dim, overlap=True),
                self.make(self.matrix(f"{name}indexer.wq_b", c.index_heads * c.index_dim, c.q_rank), None),
                self.make(self.matrix(f"{name}indexer.weights_proj", c.index_heads, c.hidden_size), None),
                c.index_heads,
            )
        return Attention(
            q_a=self.linear(f"{name}wq_a", c.q_rank, c.hidden_size),
            q_norm=self.exact(f"{name}q_norm.weight", (c.q_rank,)),
            q_b=self.linear(f"{name}wq_b", heads, c.q_rank),
            kv=self.linear(f"{name}wkv", c.head_dim, c.hidden_size),
            kv_norm=self.exact(self.either(f"{name}norm.weight", f"{name}kv_norm.weight"), (c.head_dim,)),
            sinks_N=self.exact(f"{name}attn_sink", (c.num_heads,)),
            out_a=self.grouped(out_a.view(c.o_groups, c.o_rank, -1).transpose(1, 2).contiguous()),
            out_b=self.linear(f"{name}wo_b", c.hidden_size, c.o_groups * c.o_rank),
            inverse=self.wide if rate else self.main,
            compressor=self.compressor(f"{name}compressor.", rate, c.head_dim, overlap=sparse) if rate else None,
            indexer=indexer,
            rate=rate,
            split=0 if self.invariance is None else self.invariance.attention(c.num_heads, 1, c.head_dim).split,
        )

    def grouped(self, weight_GIO: Tensor) -> Projection:
        return Grouped(weight_GIO) if self.invariance is None else self.invariance.grouped(weight_GIO)

    def compressor(self, name: str, rate: int, size: int, *, overlap: bool) -> Compressor:
        channels, hidden = size * (2 if overlap else 1), self.config.hidden_size
        both = torch.cat([self.matrix(f"{name}{part}", channels, hidden) for part in ("wkv", "wgate")])
        return Compressor(
            project=self.make(both, None),
            bias=self.exact(f"{name}ape", (rate, channels)),
            norm_D=self.exact(f"{name}norm.weight", (size,)),
            overlap=overlap,
            inverse=self.wide,
            eps=self.config.norm_eps,
        )

    def experts(self, index: int, name: str) -> Experts:
        c = self.config
        hashed = index in c.hash_layers
        table = self.exact(f"{name}gate.tid2eid", (c.vocab_size, c.experts_per_token), torch.int64) if hashed else None
        return Experts(
            gate_EH=self.router(self.matrix(f"{name}gate", c.num_experts, c.hidden_size)),
            bias_E=None if hashed else self.exact(f"{name}gate.bias", (c.num_experts,)),
            chosen_VK=table,
            routed=[self.expert(f"{name}experts.{i}.") for i in range(c.num_experts)],
            shared=self.expert(f"{name}shared_experts."),
            per_token=c.experts_per_token,
            scale=c.routed_scale,
            load_E=None if self.load_LE is None else self.load_LE[index],
        )

    def router(self, weight: Tensor) -> Tensor | Projection:
        return weight if self.invariance is None else self.invariance.linear(weight)

    def expert(self, name: str) -> Expert:
        width, hidden = self.config.expert_size, self.config.hidden_size
        gate_up = torch.cat([self.matrix(f"{name}{part}", width, hidden) for part in ("w1", "w3")])
        silu = F.silu if self.invariance is None else self.invariance.silu
        return Expert(self.pack(gate_up, None), self.linear(f"{name}w2", hidden, width), self.config.swiglu_limit, silu)

    # ---------------------------------------------------------------------------------------------------- raw tensors

    def linear(self, name: str, rows: int, columns: int) -> Projection:
        return self.pack(self.matrix(name, rows, columns), None)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """A weight in the model's dtype, dequantized where the file has scales for it."""
        base = name.removesuffix(".weight")
        place = self.place(f"{base}.weight")
        stored = self.weights.moved(place)
        named = next((s for s in (self.place(base + end) for end in SCALES) if s in self.weights), None)
        scale = None if named is None else self.weights.moved(named)
        block = self.config.scale_block
        scaled = None if scale is None else info_of(scale)
        weight_format(f"{self.weights.folder}: {place}", info_of(stored), scaled, block)
        if scale is not None:
            return self.checked(place, dequantize(stored, scale, block, dtype=self.weights.dtype), (rows, columns))
        return self.owned(self.checked(place, stored, (rows, columns)), self.weights.dtype)

    def exact(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Norms, biases and mixing weights stay float32 whatever the model's dtype is."""
        place = self.place(name)
        return self.owned(self.checked(place, self.weights.moved(place), shape), dtype)

    def owned(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """In memory of its own: what a CPU reads is a view of the file, which would keep all of it mapped."""
        return tensor.to(dtype, copy=tensor.device.type == "cpu")

    def checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.weights.folder}: {name} has shape {list(tensor.shape)}, expected {list(shape)}.")
        return tensor

    def either(self, first: str, second: str) -> str:
        return first if self.place(first) in self.weights else second

    def place(self, name: str) -> str:
        return name if name in self.weights else f"model.{name}"
