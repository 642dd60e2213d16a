"""The decoder on a GPU in the mode in which a token's bytes don't depend on what runs beside it.

Every step, prefill, verify or decode, goes through the same kernels with the same tiles: products without a split of
the inner dimension, attention of 64-row tiles over splits of one size, experts in tiles of one shape. So
chunks, prefix hits, drafts and batch sizes change nothing. Where wide tiles give the same bytes on this card, which is
tried at load, products of many rows use them.

Dimensions as in fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.decoder import Layer
from flowinfer.engine.models.fused import FusedModel, Weight
from flowinfer.engine.models.invariant import Invariance
from flowinfer.engine.models.moe import StackedExperts
from flowinfer.engine.models.rope import Rope
from flowinfer.engine.step import Features, StepInput, blocks_of_tokens
from flowinfer.errors import ModelError
from flowinfer.kernels.activation import silu_mul
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.experts import MOST_ROWS, bucket, gather_gated, route, weighted
from flowinfer.kernels.invariant_attention import TILE_ROWS, Parts, invariant_attention
from flowinfer.kernels.invariant_linear import WIDE_ROWS, invariant_linear
from flowinfer.kernels.norm import rms_norm
from flowinfer.kernels.prefill_attention import Tiling, plan_tiles
from flowinfer.kernels.rope import rope_write
from flowinfer.kernels.verify import Rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """What all layers of a step share: where its tokens are, and which program attends for whom."""

    positions: Tensor
    blocks: Tensor
    tiling: Tiling
    parts: Parts | None = None


class InvariantModel(FusedModel):
    """As FusedModel, with equal bytes for a token in every step."""

    def __init__(
        self, config: ModelConfig, embed_VH: Tensor, layers: list[Layer], norm_H: Tensor, head_VH: Tensor, rope: Rope
    ) -> None:
        super().__init__(config, embed_VH, layers, norm_H, head_VH, rope)
        self._parts: dict[int, Parts] = {}  # by blocks of a table
        self._outgrown: list[Parts] = []
        self.wide: set[tuple[int, ...]] = set()  # shapes of weights whose wide tiles give the same bytes

    def keep_invariant(self, invariance: Invariance) -> None:
        """Tries wide tiles, and a row alone against the row among others. Raises ModelError where they differ."""
        self.invariance = invariance
        weights = [(weight, False) for weight, _ in (*self._qkv[:1], *self._out[:1], (self.head_VH, None))]
        for ffn in self._ffn[:1]:
            if not isinstance(ffn, StackedExperts):
                gate_up, down = ffn
                weights += [(gate_up.weight, gate_up.bias is None), (down.weight, False)]
        for weight, gated in weights:
            if not rows_alike(weight):
                raise ModelError(
                    f"batch_invariant: products of {list(weight.shape)} differ by the rows beside them on this card.",
                    help="Leave batch_invariant out.",
                )
            if same_when_wide(weight, gated=gated):
                self.wide.add(tuple(weight.shape))

    def decode(
        self,
        last_S: Tensor,
        batch: DecodeBatch,
        kv: Tensor,
        scratch: Scratch,
        chosen: list[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As FusedModel.decode; scratch isn't needed. Rows of padding read the first position of slot 0."""
        slots = batch.slots.clamp(min=0)
        lengths = batch.lengths.index_select(0, slots)
        return self._alone(last_S.index_select(0, slots), slots, lengths, batch.slots < 0, batch, kv, chosen, out)

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
        """As FusedModel.verify: keys and values of all rows are written before the first attends, each for itself."""
        slots = batch.slots.clamp(min=0).repeat_interleave(len(rows.ids) // len(batch.slots))
        return self._alone(rows.tokens, slots, rows.lengths, rows.ids < 0, batch, kv, chosen, out, features)

    def verify_scratch(self, sequences: int, rows: int) -> Scratch:
        """Nothing."""
        return Scratch.make(1, self.heads, self.device)

    def _alone(
        self, tokens_R: Tensor, slots_R: Tensor, lengths_R: Tensor, nobody_R: Tensor, batch: DecodeBatch, kv: Tensor,
        chosen: list[Tensor] | None, out: Tensor | None, features: Features | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of rows that each attend as a sequence of their own, of so many tokens."""
        kv = self._paged(kv)
        lengths = lengths_R.masked_fill(nobody_R, 1)
        tables = batch.block_tables.index_select(0, slots_R)
        positions = (lengths - 1).long()
        blocks = tables.gather(1, (positions // kv.shape[4]).unsqueeze(1)).squeeze(1)
        starts = torch.arange(len(slots_R) + 1, dtype=torch.int32, device=self.device)
        tiles = torch.stack((starts[:-1], torch.zeros_like(starts[:-1])), 1)
        group = self.heads.num_heads // self.heads.num_kv_heads
        tiling = Tiling(tiles, starts, lengths, tables, tokens=max(1, TILE_ROWS // group))
        rows = _Rows(positions, blocks.masked_fill(nobody_R, -1), tiling, self._parts_for(tables))
        x, delta = self._through(F.embedding(tokens_R, self._embed_VH), kv, rows, None, chosen, features)
        assert x is not None, "a step that wants logits goes through the last layer"
        _, normed = rms_norm(x, self._norm_H, self.config.norm_eps, delta=delta)
        logits = self._product(normed, Weight(self.head_VH, None))
        return logits if out is None else out.copy_(logits)

    def _parts_for(self, tables: Tensor) -> Parts:
        """Room for the splits of such a step; layers and steps of one stream share it."""
        rows, blocks = tables.shape
        parts = self._parts.get(blocks)
        if parts is None or parts.arrived.shape[0] < rows * self.heads.num_kv_heads:
            if parts is not None:
                self._outgrown.append(parts)  # captured steps go on using it
            parts = self._parts[blocks] = Parts.make(rows, blocks, self.heads, self.device)
        return parts

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """As Model.forward; kv may hold anything where nothing was written yet."""
        kv = self._paged(kv)
        counts = step.query_starts[1:] - step.query_starts[:-1]
        blocks = torch.from_numpy(blocks_of_tokens(step, counts, kv.shape[4])).to(self.device, non_blocking=True)
        tiling = plan_tiles(
            step.query_starts, step.kv_lens, step.block_tables, heads=self.heads, device=self.device, dtype=kv.dtype,
            rows=TILE_ROWS,
        )  # fmt: skip
        embedded = F.embedding(step.tokens, self._embed_VH)
        x, delta = self._through(embedded, kv, _Rows(step.positions, blocks, tiling), step, None)
        if x is None or step.logit_rows is None:
            return None
        _, normed = rms_norm(x, self._norm_H, self.config.norm_eps, delta=delta)
        return self._logits(normed[step.logit_rows])

    def _logits(self, x_RH: Tensor) -> Tensor:
        return self._product(x_RH, Weight(self.head_VH, None)).float()

    def _through(
        self,
        x: Tensor,
        kv: Tensor,
        rows: _Rows,
        step: StepInput | None,
        chosen: list[Tensor] | None,
        features: Features | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The residual stream behind the last layer, and what is still to be added to it. None, None: not wanted.

        features, of a step that is captured, takes what layers give for all rows.
        """
        eps = self.config.norm_eps
        wanted = features.layers if features is not None else ()
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, normed = rms_norm(x, layer.input_norm_H, eps, delta=delta)
            if step is not None and index and step.wants(index - 1):
                step.give(index - 1, x[step.logit_rows])
            if features is not None and index - 1 in wanted:
                features.outputs[index - 1] = x.clone()
            qkv = self._product(normed, self._qkv[index])
            norms = layer.qk_norm_D
            qk = rope_write(
                qkv, kv, index, self.heads, rows.positions, rows.blocks, self._rope_PD, norms, eps
            )  # fmt: skip
            is_last = index == len(self._layers) - 1
            if is_last and step is not None and step.logit_rows is None:
                return None, None
            attended = invariant_attention(qk, kv, index, self.heads, rows.tiling, parts=rows.parts)
            x, normed = rms_norm(x, layer.post_norm_H, eps, delta=self._product(attended, self._out[index]))
            ffn = self._ffn[index]
            if isinstance(ffn, StackedExperts):
                delta = self._by_experts(normed, ffn, chosen, eager=step is not None)
            else:
                gate_up, down = ffn
                delta = self._product(self._gated(normed, gate_up), down)
        last = len(self._layers) - 1
        if last in wanted or (step is not None and step.wants(last)):
            assert delta is not None, "a layer adds something"
            given, _ = rms_norm(x.clone(), self._norm_H, eps, delta=delta)
            if features is not None:
                features.outputs[last] = given
            elif step is not None:
                step.give(last, given[step.logit_rows])
        return x, delta

    def _by_experts(self, normed: Tensor, ffn: StackedExperts, chosen: list[Tensor] | None, *, eager: bool) -> Tensor:
        """[T * top, H]: each token's experts one after the other, to be summed by the norm behind."""
        router = self._product(normed, Weight(ffn.router.weight_OI, ffn.router.bias_O))  # type: ignore[attr-defined]
        ids, weights = route(router, ffn.per_token, norm_topk=ffn.norm_topk)
        if chosen is not None:
            chosen.append(ids)
        top, num = ffn.per_token, ffn.gate_up_EOH.shape[0]
        out = normed.new_empty(len(normed) * top, normed.shape[1])
        for first in range(0, len(normed), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            routing = bucket(ids[part], weights[part], num)
            if eager and ffn.load_E is not None:
                ffn.load_E += routing.counts
            gated = gather_gated(normed[part], ffn.gate_up_EOH, routing, fixed=True)
            weighted(gated, ffn.down_EHI, routing, fixed=True, out=out[first * top : (first + MOST_ROWS) * top])
        return out

    def _product(self, x: Tensor, weight: Weight, *, gated: bool = False) -> Tensor:
        wide = x.shape[0] >= WIDE_ROWS and tuple(weight.weight.shape) in self.wide
        return invariant_linear(x.contiguous(), weight.weight, bias_O=weight.bias, gated=gated, wide=wide)

    def _gated(self, x: Tensor, gate_up: Weight) -> Tensor:
        return self._product(x, gate_up, gated=True) if gate_up.bias is None else silu_mul(self._product(x, gate_up))


def same_when_wide(weight_OI: Tensor, *, gated: bool = False) -> bool:
    """Whether wide tiles give the bytes of narrow ones for this weight, on this card."""
    x = _rows(256, weight_OI)
    narrow, wide = (invariant_linear(x, weight_OI, gated=gated, wide=wide) for wide in (False, True))
    return torch.equal(narrow, wide)


def rows_alike(weight_OI: Tensor) -> bool:
    """Whether a row of a product has the same bytes alone and among others, on this card."""
    x = _rows(130, weight_OI)
    whole = invariant_linear(x, weight_OI)
    return all(torch.equal(invariant_linear(x[at : at + n], weight_OI), whole[at : at + n]) for at, n in _CASES)


_CASES = ((0, 1), (77, 1), (3, 2), (60, 16), (1, 64), (65, 65))


def _rows(count: int, weight_OI: Tensor) -> Tensor:
    made = torch.Generator(weight_OI.device).manual_seed(count)
    shape = (count, weight_OI.shape[1])
    return torch.randn(shape, generator=made, dtype=torch.float32, device=weight_OI.device).to(weight_OI.dtype)
