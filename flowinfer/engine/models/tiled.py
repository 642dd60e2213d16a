"""The dense decoder on a CPU in one call: all layers run in one parallel region, products in tiles of bfloat16 pairs.

Between two products there is neither Python nor the start of threads, and arguments are set for all layers at once: a
step of a small model is the time of its memory and its products. Runs where `compiled.pairs_pay()`; CompiledModel is
the same with a call for each part, for other processors, dtypes and layers. Imports numba.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.engine.models.compiled import CompiledModel
from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.decoder import Layer
from flowinfer.engine.models.invariant import RowsLinear
from flowinfer.engine.models.linear import Projection, TileLinear
from flowinfer.engine.models.moe import GatedFFN
from flowinfer.engine.models.quantized import Int8Linear, QuantLinear
from flowinfer.engine.models.rope import Rope
from flowinfer.engine.step import StepInput, blocks_of_tokens
from flowinfer.kernels.activation.cpu import SILU_MUL, silu_mul_rows
from flowinfer.kernels.compiled import bits, scratch
from flowinfer.kernels.int8_linear import GROUP, Int8Weight
from flowinfer.kernels.int8_linear.cpu import LINEAR_INT8, QUANTIZE_ROWS, linear_int8, quantize_rows
from flowinfer.kernels.norm.cpu import RMS_NORM, rms_norm, rms_norm_rows
from flowinfer.kernels.paged_attention import cpu as attention
from flowinfer.kernels.paged_attention import cpu_tiles
from flowinfer.kernels.program import Phase, Program, Value
from flowinfer.kernels.rope.cpu import ROPE_WRITE, rope_write_rows
from flowinfer.kernels.tile_linear import TileWeight
from flowinfer.kernels.tile_linear.cpu import LINEAR, linear

Weight = TileWeight | Int8Weight


class _Weights(NamedTuple):
    """Products of a layer."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight


class _Rows(NamedTuple):
    """Room for what a layer hands on, for so many tokens; bfloat16. delta: what is to be added to x.

    codes uint8, steps and middles float32: rows made ready for a product of 8 bits.
    """

    x: Tensor
    normed: Tensor
    qkv: Tensor
    queries: Tensor
    attended: Tensor
    delta: Tensor
    gate_up: Tensor
    gated: Tensor
    codes: Tensor
    steps: Tensor
    middles: Tensor


def can_tile(layers: list[Layer]) -> bool:
    """Whether all products of these layers are tiles, so that TiledModel can run them."""
    return all(_products(layer) for layer in layers)


def _products(layer: Layer) -> _Weights | None:
    if not isinstance(layer.ffn, GatedFFN):
        return None
    found = [_tiles(product) for product in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)]
    whole = [weight for weight in found if weight is not None]
    return _Weights(*whole) if len(whole) == len(found) else None


def _tiles(product: Projection) -> Weight | None:
    """The weight of a product in tiles. One that was proven for any number of rows needs no splitting by rows."""
    if isinstance(product, RowsLinear) and product.least == 1 and not product.tile:
        product = product.inner
    if isinstance(product, QuantLinear):
        product = product.wide or product
    return product.weight if isinstance(product, TileLinear | Int8Linear) else None


def _few(layers: list[Layer]) -> int:
    """Rows up to which some product has a faster way than tiles."""
    return max((layer.qkv.few for layer in layers if isinstance(layer.qkv, QuantLinear)), default=0)


class TiledModel(CompiledModel):
    """Weights of one model on a CPU, bfloat16. Keys and values that nobody wrote are never read."""

    def __init__(
        self, config: ModelConfig, embed_VH: Tensor, layers: list[Layer], norm_H: Tensor, head_VH: Tensor, rope: Rope
    ) -> None:
        super().__init__(config, embed_VH, layers, norm_H, head_VH, rope)
        self._lock = threading.Lock()  # one step at a time: its rows lie in room that is kept
        self._few = _few(layers)
        self._rows: _Rows | None = None
        self._packed = torch.empty(0, dtype=torch.uint8)
        weights = [products for layer in layers if (products := _products(layer)) is not None]
        self._phases = _Phases(config, weights, self._norms, self._qk_norms, self._rope_PD)

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        """As Model.forward."""
        if step.num_tokens <= self._few:
            return super().forward(step, kv)
        with self._lock:
            return self._forward(step, kv)

    def _forward(self, step: StepInput, kv: Tensor) -> Tensor | None:
        tokens, last = step.num_tokens, len(self._layers) - 1
        rows = self._room(tokens)
        kv = kv.view(*kv.shape[:3], self._heads_of.num_kv_heads, -1, self._heads_of.head_dim)
        counts = step.query_starts[1:] - step.query_starts[:-1]
        blocks = torch.from_numpy(blocks_of_tokens(step, counts, kv.shape[4]))
        plan = attention.plan_pages(
            step.query_starts,
            step.kv_lens,
            step.block_tables,
            self._heads_of,
            kv,
            invariant=self.invariance is not None,
        )
        torch.index_select(self._embed_VH, 0, step.tokens, out=rows.x[:tokens])
        if self._packed.numel() < plan.packed:
            self._packed = torch.empty(plan.packed, dtype=torch.uint8)
        phases = self._phases
        program, kept = phases.begin(step, kv, plan, blocks, self._packed)
        done = 0
        for index in sorted(step.features.layers) if step.features is not None and step.logit_rows is not None else ():
            if index < last:
                program.run(done, index + 1)
                done = index + 1
                step.give(index, (rows.x[:tokens] + rows.delta[:tokens])[step.logit_rows])
        if step.logit_rows is None:
            program.run(done, last, end=phases.until_written)
            return None  # keys and values were all that was wanted: what follows serves logits
        program.run(done, last, end=program.each - phases.after_attention)
        wanted = len(step.logit_rows)
        for kind in (rows.x, rows.attended):
            kind[:wanted] = kind.index_select(0, step.logit_rows)
        phases.narrow(last, wanted)
        program.run(last, last + 1, begin=program.each - phases.after_attention)
        del kept
        x, delta = rows.x[:wanted], rows.delta[:wanted]
        if step.wants(last):
            step.give(last, x + delta)
        return self._logits(rms_norm(x, self._last_norm_H, self.config.norm_eps, delta=delta)[1])

    def _room(self, tokens: int) -> _Rows:
        if self._rows is None or self._rows.x.shape[0] < tokens:
            config = self.config
            n, k, d = self._heads_of
            most = -(-tokens // 64) * 64
            widths = (
                *[config.hidden_size] * 2, (n + 2 * k) * d, n * d, n * d, config.hidden_size,
                2 * config.intermediate_size, config.intermediate_size,
            )  # fmt: skip
            codes = max(config.hidden_size, n * d, config.intermediate_size) if self._phases.rounds else 0
            rows = [torch.empty(most, width, dtype=torch.bfloat16) for width in widths]
            rounded = [torch.empty(most, codes, dtype=torch.uint8), *torch.empty(2, most, codes // GROUP)]
            self._rows = _Rows._make([*rows, *rounded])
            self._phases.place(self._rows)
        return self._rows


class _Product:
    """A product in all layers: one phase, or two where rows are rounded to 8 bits before."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        first, turns = weights[0], len(weights)
        panels, bias = [weight.panels for weight in weights], [weight.bias_O for weight in weights]
        same: dict[str, Value] = {"weight": panels, "bias": bias, "n": first.rows_out, "k": first.columns}
        self._rounding: Phase | None = None
        if isinstance(first, TileWeight):
            self._main = Phase(linear, LINEAR, turns, **same)
        else:
            eight = [weight for weight in weights if isinstance(weight, Int8Weight)]
            scales, sums = [weight.scale_O for weight in eight], [weight.sums for weight in eight]
            self._rounding = Phase(quantize_rows, QUANTIZE_ROWS, turns, k=first.columns)
            self._main = Phase(linear_int8, LINEAR_INT8, turns, **same, weight_scale=scales, sums=sums)

    @property
    def phases(self) -> list[tuple[Phase, bool]]:
        """In the order in which they run."""
        return [(phase, True) for phase in (self._rounding, self._main) if phase is not None]

    def place(self, x: Tensor, y: Tensor, rows: _Rows) -> None:
        """From where to where it goes."""
        self._main.set(x=x, y=y)
        if self._rounding is not None:
            self._rounding.set(x=x, codes=rows.codes, steps=rows.steps, middles=rows.middles)
            self._main.set(x=rows.codes, steps=rows.steps, middles=rows.middles)

    def set_rows(self, count: int, turn: int | None = None) -> None:
        """How many rows, in all layers or in one."""
        for phase, _ in self.phases:
            if turn is None:
                phase.set(m=count)
            else:
                phase.set_at(turn, m=count)


class _Phases:
    """The kernels of a layer with their arguments in all layers, and programs of them.

    rounds: whether rows are rounded to 8 bits for products.  until_written: phases until a token's keys and values are
    written.  after_attention: phases behind attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: list[_Weights],
        norms: list[tuple[Tensor, Tensor]],
        qk_norms: list[tuple[Tensor, Tensor] | None],
        rope_PD: tuple[Tensor, Tensor],
    ) -> None:
        turns = len(weights)
        n, k, d = config.num_heads, config.num_kv_heads, config.head_dim
        eps, hidden, index = bits(config.norm_eps), config.hidden_size, list(range(turns))
        heads: dict[str, Value] = {"k": k, "d": d, "layer": index}
        self._input_norm = Phase(rms_norm_rows, RMS_NORM, turns, weights=[a for a, _ in norms], n=hidden, eps=eps)
        self._post_norm = Phase(rms_norm_rows, RMS_NORM, turns, weights=[b for _, b in norms], n=hidden, eps=eps)
        self._rope = Phase(
            rope_write_rows, ROPE_WRITE, turns, **heads, n=n, eps=eps, cosines=rope_PD[0], sines=rope_PD[1],
            q_norm=[norm[0] if norm else 0 for norm in qk_norms], k_norm=[norm[1] if norm else 0 for norm in qk_norms],
        )  # fmt: skip
        self._few = Phase(attention.attend_few, attention.ATTEND_FEW, turns, **heads, group=n // k)
        self._pages = Phase(cpu_tiles.attend_pages, cpu_tiles.ATTEND_PAGES, turns, **heads, group=n // k)
        self._pack = Phase(cpu_tiles.pack_pages, cpu_tiles.PACK_PAGES, turns, **heads)
        self._tiles = Phase(cpu_tiles.attend_tiles, cpu_tiles.ATTEND_TILES, turns, k=k, d=d, group=n // k)
        self._silu = Phase(silu_mul_rows, SILU_MUL, turns, n=config.intermediate_size)
        self._products = [_Product(column) for column in zip(*weights, strict=True)]
        qkv, out, gate_up, down = (product.phases for product in self._products)
        before = [(self._input_norm, True), *qkv, (self._rope, True)]
        after = [*out, (self._post_norm, True), *gate_up, (self._silu, True), *down]
        self.until_written, self.after_attention = len(before), len(after)
        self.rounds = any(isinstance(weight, Int8Weight) for weight in weights[0])
        self._around, self._turns = (before, after), index
        self._programs: dict[tuple[Phase | None, bool], Program] = {}
        usual = self._pages if cpu_tiles.reads_pages(d, 64) else self._few
        for few, many in ((None, True), (usual, False), (usual, True)):
            self._program(few, many=many)
        self._head_dim = d
        self._widest = max(hidden, config.intermediate_size)

    def place(self, rows: _Rows) -> None:
        """Where rows are handed on."""
        self._input_norm.set(x=rows.x, delta=rows.delta, out=rows.normed)
        self._input_norm.set_at(0, delta=0)
        self._post_norm.set(x=rows.x, delta=rows.delta, out=rows.normed)
        qkv, out, gate_up, down = self._products
        qkv.place(rows.normed, rows.qkv, rows)
        out.place(rows.attended, rows.delta, rows)
        gate_up.place(rows.normed, rows.gate_up, rows)
        down.place(rows.gated, rows.delta, rows)
        self._rope.set(qkv=rows.qkv, queries=rows.queries)
        for phase in (self._few, self._pages, self._tiles):
            phase.set(queries=rows.queries, out=rows.attended)
        self._silu.set(gate_up=rows.gate_up, out=rows.gated)

    def begin(
        self, step: StepInput, kv: Tensor, plan: attention.Plan, blocks: Tensor, packed: Tensor
    ) -> tuple[Program, tuple[Tensor, ...]]:
        """Sets what changes from step to step; gives what runs it, and what must live until it has."""
        tokens, block_tokens, width = step.num_tokens, kv.shape[4], plan.tables.shape[1]
        positions = step.positions.contiguous()
        room, apart = scratch(
            max(
                2 * self._widest,
                6 * self._head_dim,
                attention.few_numbers(plan.most, block_tokens, self._head_dim),
                cpu_tiles.thread_numbers(self._head_dim),
            )
        )
        for phase in (self._input_norm, self._post_norm, self._silu):
            phase.set(rows=tokens, room=room, apart=apart)
        for product in self._products:
            product.set_rows(tokens)
        pages: dict[str, Value] = {"kv": kv, "layers": kv.shape[1], "block_tokens": block_tokens}
        self._rope.set(**pages, tokens=tokens, positions=positions, blocks=blocks, room=room, apart=apart)
        few = None
        if plan.few is not None:
            few = self._pages if attention.pages_in_pairs(kv) else self._few
            few.set(
                **pages, few=plan.few, parts=plan.parts, tables=plan.tables, room=room, apart=apart, tokens=tokens,
                width=width, num_few=len(plan.few), num_parts=len(plan.parts) - 1,
            )  # fmt: skip
            self._few.set(most=plan.most)
        if plan.tiled is not None:
            chunks: dict[str, Value] = {"packed": packed, "chunks": plan.tiled, "num_chunks": len(plan.tiled)}
            self._pack.set(**pages, **chunks, tables=plan.tables, width=width)
            self._tiles.set(**chunks, room=room, apart=apart, tokens=tokens)
        return self._program(few, many=plan.tiled is not None), (positions, room, blocks)

    def _program(self, few: Phase | None, *, many: bool) -> Program:
        """What runs a step with sequences of few queries, by this phase, and of many."""
        if (few, many) not in self._programs:
            before, after = self._around
            attends = [(few, not many)] if few is not None else []
            attends += [(self._pack, True), (self._tiles, True)] if many else []
            self._programs[few, many] = Program([*before, *attends, *after], self._turns)
        return self._programs[few, many]

    def narrow(self, turn: int, rows: int) -> None:
        """From here on the turn has fewer rows: those of logits."""
        for product in self._products[1:]:
            product.set_rows(rows, turn)
        self._post_norm.set_at(turn, rows=rows)
        self._silu.set_at(turn, rows=rows)
