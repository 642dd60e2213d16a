"""DeepSeek-V4 on a GPU: the model of model.py by fused kernels, the same for any step, and steps that a graph can hold.

A layer is about twenty launches: products that read the same rows are one, and what stands between them is a kernel
each (see kernels/compressor, hyper_connections, indexer_topk, norm_turn, router, sparse_attention). Prefill, verify and
decode differ only in how rows come to be: from the host's step, or from the batch's state on the device.

Dimensions as in model.py; T tokens, B rows of a decode step, N heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.models.deepseek_v4.fused_layers import FusedLayer, pack, plain
from flowinfer.engine.models.deepseek_v4.model import Hyper, Layer, V4Model, views
from flowinfer.engine.models.linear import Projection
from flowinfer.engine.step import Features, Replays, StepInput
from flowinfer.errors import ModelError
from flowinfer.kernels import arch
from flowinfer.kernels.compressor import compress
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.experts import MOST_ROWS, bucket, gather_gated, weighted
from flowinfer.kernels.hyper_connections import Mixed, collapse, mix, spread
from flowinfer.kernels.indexer_topk import indexer_topk
from flowinfer.kernels.invariant_linear import WIDE_ROWS, invariant_linear
from flowinfer.kernels.norm_turn import norm_turn
from flowinfer.kernels.rope import Heads
from flowinfer.kernels.router import choose_experts
from flowinfer.kernels.sparse_attention import Parts, sparse_attention
from flowinfer.kernels.token_rows import TokenRows, Turn
from flowinfer.kernels.verify import Rows

OPS = (
    "compressor", "experts", "hyper_connections", "indexer_topk", "invariant_linear", "norm_turn", "router",
    "sparse_attention",
)  # fmt: skip


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all kernels of this module run there."""
    name = str(dtype).removeprefix("torch.")
    return all(arch.supported(op, str(device), name) for op in OPS)


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers share. turns: of each token, by layer kind (0: window only); closing: of the group's first token.

    chosen: takes the experts of each row, by layer; else they are counted into the layers' load.
    """

    tokens: Tensor
    rows: TokenRows
    turns: dict[bool, Turn]
    closing: dict[int, Turn]
    parts: Parts | None = None
    chosen: list[Tensor] | None = None


class FusedV4(V4Model):
    """Weights of one model on one GPU. `forward` takes any step; `decode` and `verify` never wait for the host.

    invariant: all products by tiles of one shape, so that a token's bytes don't depend on what runs beside it.
    inverses: rotary frequencies of window layers and of the others.
    """

    def __init__(
        self,
        config: V4Config,
        embed_VH: Tensor,
        layers: list[Layer],
        head_hyper: Hyper,
        norm_H: Tensor,
        head: Projection,
        *,
        inverses: tuple[Tensor, Tensor],
        invariant: bool = False,
    ) -> None:
        super().__init__(config, embed_VH, [], head_hyper, norm_H, head)
        self.heads = Heads(config.num_heads, 1, config.head_dim)
        self.head_VH = plain(head)
        self.invariant = invariant
        self.wide: set[tuple[int, ...]] = set()  # shapes of weights whose wide tiles give the same bytes
        self._main, self._wide = inverses
        self._fused: list[FusedLayer] = []
        for index, layer in enumerate(layers):
            self._fused.append(pack(layer, config))
            layers[index] = None  # type: ignore[call-overload]  # its weights are in memory once
        if invariant:
            self._prove()

    def project(self, x_RH: Tensor) -> Tensor:
        """As V4Model.project."""
        return self._product(x_RH.to(self.dtype), self.head_VH).float()

    # -------------------------------------------------------------------------------------- rows of the batch's state

    def decode(
        self,
        last_S: Tensor,
        batch: DecodeBatch,
        kv: Tensor,
        scratch: Scratch,
        chosen: list[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As FusedModel.decode: logits [B, V] of the token that follows each slot's last one, which is written."""
        slots = batch.slots.clamp(min=0)
        lengths = batch.lengths.index_select(0, slots)
        none = torch.zeros_like(lengths)
        rows = TokenRows(
            batch.slots, lengths - 1, lengths - 1, lengths, none, none, batch.block_tables, self.config.block_tokens,
            single=True,
        )  # fmt: skip
        return self._on_device(last_S.index_select(0, slots), rows, kv, scratch, chosen, out, None)

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
        """As FusedModel.verify: logits [R, V] of the token behind each slot's last one and each of its drafts."""
        each = len(rows.tokens) // len(batch.slots)
        slots = batch.slots.unsqueeze(1).expand(-1, each).flatten()
        firsts = batch.lengths.index_select(0, batch.slots.clamp(min=0)) - 1
        ends = (firsts + rows.counts).unsqueeze(1).expand(-1, each).flatten()
        none = torch.zeros_like(slots)
        own = TokenRows(
            torch.where(rows.ids >= 0, slots, -1), (rows.lengths - 1).clamp(min=0),
            firsts.unsqueeze(1).expand(-1, each).flatten(), ends, none, none,
            batch.block_tables, self.config.block_tokens,
        )  # fmt: skip
        return self._on_device(rows.tokens, own, kv, scratch, chosen, out, features)

    def verify_scratch(self, sequences: int, rows: int) -> Scratch:
        """What `verify` needs for batches of up to so many sequences of so many rows."""
        return Scratch.make(sequences * rows, self.heads, self.device)

    def _on_device(
        self,
        tokens: Tensor,
        rows: TokenRows,
        kv: Tensor,
        scratch: Scratch,
        chosen: list[Tensor] | None,
        out: Tensor | None,
        features: Features | None,
    ) -> Tensor:
        step = self._step(tokens.long(), rows, parts=Parts(scratch.sums, scratch.peaks), chosen=chosen)
        x = self._through(step, kv, features, None, unread=False)
        logits = self._product(self._collapsed(x), self.head_VH)
        return logits if out is None else out.copy_(logits)

    # ------------------------------------------------------------------------------------------------------- any step

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """As V4Model.forward; kv may hold anything where nothing was written yet."""
        rows = rows_of(step, self.device, self.config.block_tokens)
        at = step.logit_rows
        x = self._through(self._step(step.tokens, rows), kv, step.features, at, unread=at is None)
        return None if at is None else self._product(self._collapsed(x[at]), self.head_VH).float()

    def _step(
        self, tokens: Tensor, rows: TokenRows, parts: Parts | None = None, chosen: list[Tensor] | None = None
    ) -> _Step:
        at = rows.positions
        rates = {layer.rate for layer in self._fused if layer.rate}
        turns = {False: _turn(at, self._main), True: _turn(at, self._wide)}
        closing = {rate: _turn((at + 1 - rate).clamp(min=0), self._wide) for rate in rates}
        return _Step(tokens, rows, turns, closing, parts, chosen)

    def _through(
        self, step: _Step, kv: Tensor, features: Features | None, at: Tensor | None, *, unread: bool
    ) -> Tensor:
        """The streams behind the last layer [T, M, H]. unread: only keys and entries are wanted of the last one.

        features takes means of the streams, of rows `at` or all.
        """
        config = self.config
        x = F.embedding(step.tokens, self._embed_VH).unsqueeze(1).expand(-1, config.streams, -1).contiguous()
        for index, (layer, sections) in enumerate(zip(self._fused, views(kv, config), strict=True)):
            mixed = self._mixed(x, layer.attention_hyper, layer.attention_norm)
            own = self._product(mixed.normed, layer.first)
            self._write(own, layer, sections, step)
            if unread and index == config.num_layers - 1:
                break
            spread(x, self._attended(own, layer, sections, step), mixed)
            mixed = self._mixed(x, layer.ffn_hyper, layer.ffn_norm)
            spread(x, self._by_experts(mixed.normed, layer, step), mixed)
            if features is not None and index in features.layers and not unread:
                features.outputs[index] = (x if at is None else x[at]).mean(1)
        return x

    def _mixed(self, x: Tensor, hyper: tuple[Tensor, Tensor, Tensor], norm_H: Tensor) -> Mixed:
        config = self.config
        return mix(
            x, *hyper, norm_H, iterations=config.sinkhorn_iterations, eps=config.hyper_eps, norm_eps=config.norm_eps
        )

    def _collapsed(self, x: Tensor) -> Tensor:
        hyper, config = self._head_hyper, self.config
        assert isinstance(hyper.fn, Tensor)
        return collapse(
            x, hyper.fn, hyper.base, hyper.scale, self._norm_H, eps=config.hyper_eps, norm_eps=config.norm_eps
        )

    def _write(self, own: Tensor, layer: FusedLayer, sections: dict[str, Tensor], step: _Step) -> None:
        """Window keys, compressed entries and open rows of the step, into the arena."""
        parts, eps = own.split(layer.sizes, 1), self.config.norm_eps
        key = parts[1].unsqueeze(1)
        turn = step.turns[layer.rate > 0]
        norm_turn(key, eps=eps, weight_D=layer.kv_norm, turn=turn, into=(sections["window"], step.rows))
        names = (("entries", "tail"), ("index", "index_tail"))
        for pool, rows, (entries, tail) in zip(layer.pools, parts[2:], names, strict=False):
            compress(rows, pool, sections[entries], sections[tail], step.rows, step.closing[layer.rate])

    def _attended(self, own: Tensor, layer: FusedLayer, sections: dict[str, Tensor], step: _Step) -> Tensor:
        config, rows, turn = self.config, step.rows, step.turns[layer.rate > 0]
        heads = config.num_heads * config.head_dim
        parts = own.split(layer.sizes, 1)
        rank = norm_turn(parts[0].unsqueeze(1), eps=config.norm_eps, weight_D=layer.q_norm).squeeze(1)
        second = self._product(rank, layer.second)
        q = norm_turn(second[:, :heads].unflatten(1, (config.num_heads, -1)), eps=config.norm_eps, turn=turn)
        chosen = None
        if layer.indexed and rows.most_tokens // layer.rate > config.index_topk:
            index_q = norm_turn(second[:, heads:].unflatten(1, (config.index_heads, -1)), turn=turn)
            chosen = indexer_topk(
                index_q, parts[4], sections["index"], rows, rate=layer.rate, top=config.index_topk
            )  # fmt: skip
        out = sparse_attention(
            q, sections["window"], sections.get("entries"), rows, reach=config.window, rate=layer.rate,
            sinks_N=layer.sinks, chosen_TK=chosen, turn=turn, parts=step.parts,
            fixed=self.invariant,
        )  # fmt: skip
        return self._product(self._grouped(out.view(len(out), config.o_groups, -1), layer.out_a), layer.out_b)

    def _grouped(self, x_TGI: Tensor, weight_GOI: Tensor) -> Tensor:
        """A product a group, [T, groups * out]."""
        if self.invariant:
            parts = zip(x_TGI.unbind(1), weight_GOI, strict=True)
            return torch.cat([self._product(x.contiguous(), weight) for x, weight in parts], 1)
        return torch.bmm(x_TGI.transpose(0, 1), weight_GOI.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _by_experts(self, normed: Tensor, layer: FusedLayer, step: _Step) -> Tensor:
        """[T * (top + 1), H]: each token's experts one after the other, the shared one last."""
        config, top = self.config, self.config.experts_per_token + 1
        logits = self._product(normed, layer.router)
        ids, weights = choose_experts(
            logits, config.experts_per_token, scale=config.routed_scale, bias_E=layer.bias, chosen_VK=layer.table,
            tokens_T=step.tokens if layer.table is not None else None, shared=True,
        )  # fmt: skip
        if step.chosen is not None:
            step.chosen.append(ids[:, :-1])
        out = normed.new_empty(len(normed) * top, config.hidden_size)
        for first in range(0, len(normed), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            routing = bucket(ids[part], weights[part], config.num_experts + 1)
            if step.chosen is None and layer.load is not None:
                layer.load.add_(routing.counts[:-1])
            gated = gather_gated(
                normed[part], layer.gate_up, routing, fixed=self.invariant, limit=config.swiglu_limit
            )  # fmt: skip
            own = out[first * top : (first + MOST_ROWS) * top]
            weighted(gated, layer.down, routing, fixed=self.invariant, out=own)
        return out

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.invariant:
            return F.linear(x, weight)
        wide = x.shape[0] >= WIDE_ROWS and tuple(weight.shape) in self.wide
        return invariant_linear(x, weight, wide=wide)

    def _prove(self) -> None:
        """Tries each shape of product: a row alone against the row among others, and wide tiles."""
        from flowinfer.engine.models.fused_invariant import rows_alike, same_when_wide

        weights = {tuple(w.shape): w for layer in self._fused for w in layer.products} | {
            tuple(self.head_VH.shape): self.head_VH
        }
        for shape, weight in weights.items():
            if not rows_alike(weight):
                raise ModelError(
                    f"batch_invariant: products of {list(shape)} differ by the rows beside them on this card.",
                    help="Leave batch_invariant out.",
                )
            if same_when_wide(weight):
                self.wide.add(shape)


def _turn(positions: Tensor, inverse: Tensor) -> Turn:
    angles = positions.float().unsqueeze(-1) * inverse
    return Turn(angles.cos(), angles.sin())


def rows_of(step: StepInput, device: torch.device, block_tokens: int) -> TokenRows:
    """Rows of a step that the host describes, sent in two copies."""
    counts = np.diff(step.query_starts)
    sequence = np.repeat(np.arange(len(counts)), counts)
    firsts = (step.kv_lens - counts)[sequence]
    within = np.arange(len(sequence)) - step.query_starts[:-1][sequence]
    nothing = np.zeros(len(counts), np.int32)
    replays = step.replays or Replays(nothing, nothing)
    columns = (
        sequence, firsts + within, firsts, step.kv_lens[sequence], replays.window_from[sequence],
        replays.entries_from[sequence],
    )  # fmt: skip
    sent = torch.from_numpy(np.stack(columns).astype(np.int32)).to(device)
    tables = torch.from_numpy(np.ascontiguousarray(step.block_tables, np.int32)).to(device)
    slots, positions, starts, ends, window_from, entries_from = sent.unbind()
    return TokenRows(
        slots, positions, starts, ends, window_from, entries_from, tables, block_tokens, bool((counts == 1).all())
    )
