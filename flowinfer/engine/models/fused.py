"""The decoder on a GPU: the same model as decoder.py, by fused kernels, and a decode step that a CUDA graph can hold.

A layer is seven launches at up to FEW_ROWS rows: sum and norm, q/k/v, attention with rotation and KV write, output, sum
and norm, gate and up with their activation, down. Above, the activation is one of its own. Products are cuBLAS's where
those are the fastest: on an H200 they read 2.9 to 4.1 TB/s of weights at any small number of rows.

Dimensions as in decoder.py; B rows of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.decoder import Layer, Model
from flowinfer.engine.models.linear import Linear, Projection
from flowinfer.engine.models.moe import ExpertFFN, GatedFFN, StackedExperts
from flowinfer.engine.models.rope import Rope
from flowinfer.engine.step import Features, StepInput, blocks_of_tokens
from flowinfer.kernels import arch
from flowinfer.kernels.activation import silu_mul
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention
from flowinfer.kernels.experts import Routing, bucket, experts, gather_gated, route, weighted
from flowinfer.kernels.norm import rms_norm
from flowinfer.kernels.prefill_attention import Tiling, plan_tiles, prefill_attention
from flowinfer.kernels.rope import Heads, rope_write
from flowinfer.kernels.skinny_linear import skinny_linear
from flowinfer.kernels.verify import Rows
from flowinfer.kernels.verify_attention import make_scratch, verify_attention

FEW_ROWS = 16  # rows up to which skinny_linear beats cuBLAS by up to a tenth on products as long as the hidden size
OWN_ROWS = 512  # whole prompts of at least so many tokens attend by torch's kernel: it reads no pages

_OTHERS = ("fp8_linear", "fp8_experts", "grouped_experts", "rejection")  # what these models do without
_OPS = tuple(needs.op for needs in arch.TABLE if needs.triton and needs.op not in _OTHERS)


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all kernels of this module run there."""
    name = str(dtype).removeprefix("torch.")
    return all(arch.supported(op, str(device), name) for op in _OPS)


class Weight(NamedTuple):
    """A projection's weight [out, in] and bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of an eager step share."""

    positions: Tensor
    blocks: Tensor
    tiling: Tiling | None
    own: tuple[int, ...] | None  # token counts of the sequences, where each is a whole prompt


class FusedModel(Model):
    """Weights of one model on one GPU. `forward` takes any step; `decode` one token a sequence, without the host."""

    def __init__(
        self, config: ModelConfig, embed_VH: Tensor, layers: list[Layer], norm_H: Tensor, head_VH: Tensor, rope: Rope
    ) -> None:
        super().__init__(config, embed_VH, layers, norm_H, head_VH, rope)
        self.head_VH = head_VH
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._rope_PD = (rope.cos_PD, rope.sin_PD)
        self._take(layers)

    def _take(self, layers: list[Layer]) -> None:
        self._qkv = [_plain(layer.qkv) for layer in layers]
        self._out = [_plain(layer.out) for layer in layers]
        self._ffn = [_feed_forward(layer.ffn) for layer in layers]

    def warmup(self) -> None:
        """Nothing to pack."""

    # ------------------------------------------------------------------------------------------------ one token a row

    def decode(
        self,
        last_S: Tensor,
        batch: DecodeBatch,
        kv: Tensor,
        scratch: Scratch,
        chosen: list[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, V] in the model's dtype of the token that follows each slot's last one, whose KV is written.

        last_S int32: last token by slot. Nothing here waits for the device. chosen, where given, receives a tensor
        int32 [B, top] for each expert layer: the experts of each row. out [B, V], where given, takes the logits.
        """
        kv = self._paged(kv)

        def attend(qkv: Tensor, index: int) -> Tensor:
            norms, eps = self._layers[index].qk_norm_D, self.config.norm_eps
            return decode_attention(qkv, kv, index, self.heads, batch, self._rope_PD, norms, eps, scratch)

        return self._rows(last_S.index_select(0, batch.slots.clamp(min=0)), attend, chosen, out=out)

    def verify(
        self,
        rows: Rows,
        batch: DecodeBatch,
        kv: Tensor,
        scratch: Scratch,
        chosen: list[Tensor] | None = None,
        out: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """Logits [R, V] of the token behind each row: each slot's last token and its drafts, whose KV is written.

        batch as of the last tokens; scratch of verify_attention. chosen and out as in decode, by row; features takes
        what its layers give for all rows. What rows that aren't real give is finite and means nothing.
        """
        kv = self._paged(kv)

        def attend(qkv: Tensor, index: int) -> Tensor:
            norms, eps = self._layers[index].qk_norm_D, self.config.norm_eps
            return verify_attention(
                qkv, kv, index, self.heads, batch, rows.counts, self._rope_PD, norms, eps, scratch
            )  # fmt: skip

        return self._rows(rows.tokens, attend, chosen, out=out, features=features)

    def verify_scratch(self, sequences: int, rows: int) -> Scratch:
        """What `verify` needs for batches of up to so many sequences of so many rows."""
        return make_scratch(sequences, rows, self.heads, self.device)

    def _rows(
        self,
        tokens: Tensor,
        attend: Callable[[Tensor, int], Tensor],
        chosen: list[Tensor] | None,
        *,
        out: Tensor | None,
        features: Features | None = None,
    ) -> Tensor:
        x = F.embedding(tokens, self._embed_VH)
        eps, delta = self.config.norm_eps, None
        for index, layer in enumerate(self._layers):
            x, normed = rms_norm(x, layer.input_norm_H, eps, delta=delta)
            attended = attend(self._project(normed, index), index)
            x, normed = rms_norm(x, layer.post_norm_H, eps, delta=self._output(attended, index))
            ffn = layer.ffn
            if isinstance(ffn, StackedExperts):
                delta = self._routed(normed, ffn, self._bucketed(F.linear(normed, *_plain(ffn.router)), ffn, chosen))
            else:
                delta = self._dense(normed, index, split=True)
            if features is not None and index in features.layers:
                given, _ = rms_norm(x.clone(), self._norm_H, eps, delta=delta)  # delta may be a row for each expert
                features.outputs[index] = given
        _, normed = rms_norm(x, self._norm_H, eps, delta=delta)
        return F.linear(normed, self.head_VH) if out is None else torch.mm(normed, self.head_VH.t(), out=out)

    def _bucketed(self, logits: Tensor, ffn: StackedExperts, chosen: list[Tensor] | None) -> Routing:
        ids, weights = route(logits, ffn.per_token, norm_topk=ffn.norm_topk)
        routing = bucket(ids, weights, ffn.gate_up_EOH.shape[0])
        if chosen is not None:
            chosen.append(ids)
        return routing

    # ----------------------------------------------------------------------------------- products, by plain weights

    def _project(self, normed: Tensor, index: int) -> Tensor:
        """q, k and v of a layer, [T, (N + 2 K) D]."""
        return F.linear(normed, *self._qkv[index])

    def _output(self, attended: Tensor, index: int) -> Tensor:
        """[T, H], or parts of it that the norm behind sums."""
        return _product(attended, self._out[index])

    def _output_of(self, parts: list[Tensor], counts: tuple[int, ...], index: int) -> Tensor:
        """[T, H] of what sequences of so many tokens attended to."""
        out = self._out[index]
        if len(parts) == 1 or out.bias is not None:
            return F.linear(torch.cat(parts) if len(parts) > 1 else parts[0], *out)
        whole = parts[0].new_empty(sum(counts), self.config.hidden_size)
        for part, place in zip(parts, whole.split(counts), strict=True):
            torch.mm(part, out.weight.t(), out=place)
        return whole

    def _routed(self, normed: Tensor, ffn: StackedExperts, routing: Routing) -> Tensor:
        """[T * top, H]: each token's experts one after the other, weighted."""
        return weighted(gather_gated(normed, ffn.gate_up_EOH, routing), ffn.down_EHI, routing)

    def _mixture(self, normed: Tensor, ffn: StackedExperts, x: Tensor) -> Tensor:
        """x + experts(normed), written over x, for any number of tokens."""
        logits = F.linear(normed, *_plain(ffn.router))
        return experts(
            normed, logits, ffn.gate_up_EOH, ffn.down_EHI, x, ffn.per_token, norm_topk=ffn.norm_topk, load_E=ffn.load_E
        )

    def _dense(self, normed: Tensor, index: int, *, split: bool = False) -> Tensor:
        """[T, H]; with split it may be parts that the norm behind sums."""
        ffn = self._ffn[index]
        assert not isinstance(ffn, StackedExperts), "experts have a way of their own"
        gate_up, down = ffn
        if normed.shape[0] <= FEW_ROWS and gate_up.bias is None:
            return _product(skinny_linear(normed, gate_up.weight, gated=True), down)
        return F.linear(silu_mul(F.linear(normed, *gate_up)), *down)

    # ----------------------------------------------------------------------------------------------------- any step

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """As Model.forward; kv may hold anything where nothing was written yet."""
        kv = self._paged(kv)
        shared, eps, delta = self._shared(step, kv), self.config.norm_eps, None
        x = F.embedding(step.tokens, self._embed_VH)
        for index, layer in enumerate(self._layers):
            x, normed = rms_norm(x, layer.input_norm_H, eps, delta=delta)
            qkv = self._project(normed, index)
            qk = self._write(qkv, kv, shared, index)
            if step.logit_rows is None and index == len(self._layers) - 1:
                return None  # keys and values were all that was wanted: what follows in the last layer serves logits
            x, normed = rms_norm(x, layer.post_norm_H, eps, delta=self._attended(qk, qkv, kv, shared, index))
            if isinstance(layer.ffn, StackedExperts):
                x, delta = self._mixture(normed, layer.ffn, x), None
            else:
                delta = self._dense(normed, index)
            if step.wants(index):
                step.give(index, _at(step.logit_rows, x, delta))
        assert step.logit_rows is not None, "a step without logits has returned from its last layer"
        _, normed = rms_norm(_at(step.logit_rows, x, delta), self._norm_H, eps)
        return self._logits(normed)

    def _logits(self, x_RH: Tensor) -> Tensor:
        return F.linear(x_RH, self.head_VH).float()

    def _paged(self, kv: Tensor) -> Tensor:
        """The arena as [blocks, layers, 2, K, block_tokens, D], which its bytes are, whatever its shape says."""
        return kv.view(*kv.shape[:3], self.heads.num_kv_heads, -1, self.heads.head_dim)

    def _shared(self, step: StepInput, kv: Tensor) -> _Step:
        counts = step.query_starts[1:] - step.query_starts[:-1]
        block_tokens = kv.shape[4]
        blocks = blocks_of_tokens(step, counts, block_tokens)
        own = bool((counts == step.kv_lens).all()) and int(counts.min()) >= OWN_ROWS and self.dtype is torch.bfloat16
        tiling = None
        if not own:
            tiling = plan_tiles(
                step.query_starts, step.kv_lens, step.block_tables, heads=self.heads, device=self.device,
                dtype=self.dtype,
            )  # fmt: skip
        sent = torch.from_numpy(blocks).to(self.device, non_blocking=True)
        return _Step(step.positions, sent, tiling, tuple(counts.tolist()) if own else None)

    def _write(self, qkv: Tensor, kv: Tensor, shared: _Step, index: int) -> Tensor:
        norms, eps = self._layers[index].qk_norm_D, self.config.norm_eps
        return rope_write(qkv, kv, index, self.heads, shared.positions, shared.blocks, self._rope_PD, norms, eps)

    def _attended(self, qk: Tensor, qkv: Tensor, kv: Tensor, shared: _Step, index: int) -> Tensor:
        """Attention and its output projection, [T, H]."""
        if shared.own is None:
            assert shared.tiling is not None
            return self._output(prefill_attention(qk, kv, index, self.heads, shared.tiling), index)
        return self._output_of(attend_own(qk, qkv, self.heads, shared.own), shared.own, index)


def attend_own(qk: Tensor, qkv: Tensor, heads: Heads, counts: tuple[int, ...]) -> list[Tensor]:
    """Causal attention of whole prompts over their own keys and values, [tokens, N D] each, by torch's best kernel.

    qk [T, N + K, D] rotated; values are the last K heads of qkv [T, (N + 2 K) D].
    """
    n, k, d = heads
    values = qkv.view(-1, n + 2 * k, d)[:, n + k :]
    outs = []
    for qk_part, v_part in zip(qk.split(counts), values.split(counts), strict=True):
        q, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (qk_part[:, :n], qk_part[:, n:], v_part))
        attended = F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=n != k)
        outs.append(attended[0].transpose(0, 1).reshape(-1, n * d))
    return outs


def _at(rows: Tensor | None, x: Tensor, delta: Tensor | None) -> Tensor:
    """Rows of the residual stream, of which delta may not be added yet."""
    return x[rows] if delta is None else x[rows] + delta[rows]


def _product(x: Tensor, weight: Weight) -> Tensor:
    """x W^T + b, by whichever kernel is the faster at this many rows."""
    if x.shape[0] <= FEW_ROWS:
        return skinny_linear(x, weight.weight, bias_O=weight.bias)
    return F.linear(x, *weight)


def _plain(projection: Projection) -> Weight:
    assert isinstance(projection, Linear), "projections on a GPU are plain"
    return Weight(projection.weight_OI, projection.bias_O)


def _feed_forward(ffn: GatedFFN | ExpertFFN | StackedExperts) -> tuple[Weight, Weight] | StackedExperts:
    if isinstance(ffn, StackedExperts):
        return ffn
    assert isinstance(ffn, GatedFFN), "the loader stacks experts for this model"
    return _plain(ffn.gate_up), _plain(ffn.down)
