"""Small matrix products in a CPU's registers, by its dot products of bfloat16 pairs (AVX512_BF16). Imports numba.

A tile is rows of A times 16-column vectors of B, its float32 sums kept in registers while it goes along the inner
dimension two numbers a step: A's pair is spread over a register, B's pairs lie side by side. Every sum is built in the
one order of the inner dimension, so a row's result is the same in a tile of any shape. LLVM's intermediate code is
written directly: a compiler that is given loops doesn't find this instruction.

B is packed: [steps][columns][2], the columns of a step apart from the next ones' by `apart_b` bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16  # float32 numbers of a register


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_INT32, _INT64, _SINGLE = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
SUMS, _WORDS = ir.VectorType(_SINGLE, LANES), ir.VectorType(_INT32, LANES)
PAIRS, _HALVES = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(_BFloat(), LANES)


def tile(rows: int, vectors: int, *, start: str, half: bool, prefetch: int = 0) -> Any:
    """A loop (a, apart_a, b, apart_b, steps, c, apart_c, begin), addresses and distances in bytes, steps at least 1.

    a: rows of bfloat16 pairs, apart_a bytes between two.  c: rows of bfloat16 (half) or float32, which is written.
    start: what sums begin with: "zero", "bias" (float32 [columns] at `begin`, for each row) or "sum" (float32 c).
    prefetch: two arguments more: lines of memory to ask for, 4 a step, and how far they move a step; 3 brings them to
    the first cache, 2 to the second.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_tile(_Writer(context, builder), rows, vectors, args, start, half=half, prefetch=prefetch)
        return context.get_dummy_value()

    if prefetch:

        @intrinsic
        def tiled(
            typing: Any, a: Any, da: Any, b: Any, db: Any, n: Any, c: Any, dc: Any, begin: Any, near: Any, dn: Any
        ) -> Any:
            return types.void(*[types.int64] * 10), codegen

    else:

        @intrinsic
        def tiled(typing: Any, a: Any, da: Any, b: Any, db: Any, n: Any, c: Any, dc: Any, begin: Any) -> Any:
            return types.void(*[types.int64] * 8), codegen

    return tiled


class _Writer:
    """Code being written: vectors of float32 sums and of bfloat16 pairs, and where they lie."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.builder = builder
        self.line = context.get_value_type(types.voidptr)

    def dot(self, sums: Any, x: Any, y: Any) -> Any:
        """sums + x * y, the products of a pair added to one sum."""
        wanted = ir.FunctionType(SUMS, [SUMS, PAIRS, PAIRS])
        product = self.builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), wanted)
        return self.builder.call(product, [sums, x, y])

    def spread(self, address: Any) -> Any:
        """The pair at an address, in all lanes."""
        return self.builder.bitcast(self.spread_word(address), PAIRS)

    def spread_word(self, address: Any) -> Any:
        """Four bytes at an address, in all lanes."""
        builder, anything = self.builder, ir.Constant(_WORDS, ir.Undefined)
        word = builder.insert_element(anything, self.load(address, _INT32, 4), ir.Constant(_INT32, 0))
        return builder.shuffle_vector(word, anything, ir.Constant(_WORDS, [0] * LANES))

    def spread_single(self, address: Any) -> Any:
        """The float32 at an address, in all lanes."""
        return self.builder.bitcast(self.spread_word(address), SUMS)

    def dot_bytes(self, counts: Any, unsigned: Any, signed: Any) -> Any:
        """counts + unsigned * signed, the products of four bytes added to one count."""
        wanted = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
        product = self.builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), wanted)
        return self.builder.call(product, [counts, unsigned, signed])

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        kind = ir.FunctionType(SUMS, [SUMS, SUMS, SUMS])
        return self.builder.call(self.builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind), [x, y, z])

    def shuffled(self, x: Any, y: Any, lanes: list[int]) -> Any:
        """Lanes of x, and behind them of y."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: Any, level: int) -> None:
        kinds = [self.line, _INT32, _INT32, _INT32]
        wanted = ir.FunctionType(ir.VoidType(), kinds)
        asked = self.builder.module.declare_intrinsic("llvm.prefetch", [self.line], wanted)
        read, near, data = (ir.Constant(_INT32, value) for value in (0, level, 1))
        self.builder.call(asked, [self.builder.inttoptr(address, self.line), read, near, data])

    def moved(self, address: Any, by: int) -> Any:
        return self.builder.add(address, number(by)) if by else address

    def rows(self, first: Any, apart: Any, count: int) -> list[Any]:
        """Addresses of rows."""
        rows = [first]
        while len(rows) < count:
            rows.append(self.builder.add(rows[-1], apart))
        return rows

    def loop(self, steps: Any, moving: list[tuple[Any, Any]], first: list[Any], body: Any) -> list[Any]:
        """Runs body(step, addresses, values) -> values `steps` times, at least once; what the last one gave.

        moving: addresses and how far each moves a step.
        """
        builder = self.builder
        before, block = builder.block, builder.function.append_basic_block("step")
        builder.branch(block)
        builder.position_at_end(block)
        starts = [number(0), *(address for address, _ in moving), *first]
        phis = [builder.phi(start.type) for start in starts]
        step, places, values = phis[0], phis[1 : 1 + len(moving)], phis[1 + len(moving) :]
        reached = body(step, places, values)
        after = builder.add(step, number(1))
        ends = [after, *(builder.add(at, by) for at, (_, by) in zip(places, moving, strict=True)), *reached]
        for phi, start, new in zip(phis, starts, ends, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(new, block)
        end = builder.function.append_basic_block("end")
        builder.cbranch(builder.icmp_signed("<", after, steps), block, end)
        builder.position_at_end(end)
        return list(reached)


def _emit_tile(
    writer: _Writer, rows: int, vectors: int, args: list[Any], start: str, *, half: bool, prefetch: int
) -> None:
    builder = writer.builder
    a, apart_a, b, apart_b, steps, c, apart_c, begin, *ahead = args
    rows_a, rows_c = writer.rows(a, apart_a, rows), writer.rows(c, apart_c, rows)

    def first(r: int, v: int) -> Any:
        if start == "zero":
            return ir.Constant(SUMS, [0.0] * LANES)
        return writer.load(writer.moved(begin if start == "bias" else rows_c[r], 64 * v), SUMS, 4)

    def body(step: Any, places: list[Any], sums: list[Any]) -> list[Any]:
        columns = [writer.load(writer.moved(places[0], 64 * v), PAIRS, 4) for v in range(vectors)]
        for v in range(vectors) if ahead else ():
            writer.prefetch(writer.moved(places[1], 64 * v), prefetch)
        along = builder.shl(step, number(2))
        pairs = [writer.spread(builder.add(row, along)) for row in rows_a]
        return [writer.dot(total, columns[i % vectors], pairs[i // vectors]) for i, total in enumerate(sums)]

    begun = [first(r, v) for r in range(rows) for v in range(vectors)]
    for i, sums in enumerate(writer.loop(steps, [(b, apart_b), *([tuple(ahead)] if ahead else [])], begun, body)):
        value = builder.fptrunc(sums, _HALVES) if half else sums
        address = writer.moved(rows_c[i // vectors], (32 if half else 64) * (i % vectors))
        writer.store(value, address, 2 if half else 4)


def tile_int8(rows: int, *, prefetch: int) -> Any:
    """A loop (a, k, steps, middles, b, sums, scale, bias, c, apart_c, near, moving): rows times 32 columns over bytes.

    a: rows of k uint8.  steps, middles float32 [rows, k / 32]: a number is its byte times the step of its 32, plus
    their middle.  b: int8 [k / 4][32][4].  sums int16 [k / 32][32], of 32 of b.  scale, bias float32 [32], of columns.
    c: rows of bfloat16.  near, moving, prefetch as in tile, 2 lines a step of four bytes.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, k, steps, middles, b, sums, scale, bias, c, apart_c, near, moving = args
        writer = _Writer(context, builder)
        groups = builder.ashr(k, number(5))
        apart = builder.shl(groups, number(2))
        rows_a, rows_step, rows_middle = (
            writer.rows(a, k, rows),
            writer.rows(steps, apart, rows),
            writer.rows(middles, apart, rows),
        )
        nothing, whole = ir.Constant(SUMS, [0.0] * LANES), ir.Constant(_WORDS, [0] * LANES)

        def body(step: Any, places: list[Any], values: list[Any]) -> list[Any]:
            counts = [whole] * (2 * rows)
            along = builder.shl(step, number(5))
            ahead = places[1]
            for four in range(8):
                columns = [writer.load(writer.moved(places[0], 128 * four + 64 * v), _WORDS, 4) for v in (0, 1)]
                for v in (0, 1):
                    writer.prefetch(writer.moved(ahead, 64 * v), prefetch)
                ahead = builder.add(ahead, moving)
                bytes_a = [writer.spread_word(writer.moved(builder.add(row, along), 4 * four)) for row in rows_a]
                counts = [writer.dot_bytes(n, bytes_a[i // 2], columns[i % 2]) for i, n in enumerate(counts)]
            at = builder.shl(step, number(2))
            short = [writer.load(writer.moved(places[2], 32 * v), _SHORTS, 2) for v in (0, 1)]
            weights = [builder.sitofp(builder.sext(one, _WORDS), SUMS) for one in short]
            factors = [writer.spread_single(builder.add(row, at)) for row in rows_step]
            shifts = [writer.spread_single(builder.add(row, at)) for row in rows_middle]
            scaled = [
                writer.multiply_add(builder.sitofp(n, SUMS), factors[i // 2], values[i]) for i, n in enumerate(counts)
            ]
            return [writer.multiply_add(weights[i % 2], shifts[i // 2], total) for i, total in enumerate(scaled)]

        group_moves = builder.shl(moving, number(3))
        moving_on = [(b, number(1024)), (near, group_moves), (sums, number(64))]
        reached = writer.loop(groups, moving_on, [nothing] * (2 * rows), body)
        of_columns = [[writer.load(writer.moved(place, 64 * v), SUMS, 4) for v in (0, 1)] for place in (scale, bias)]
        rows_c = writer.rows(c, apart_c, rows)
        for i, total in enumerate(reached):
            value = writer.multiply_add(total, of_columns[0][i % 2], of_columns[1][i % 2])
            writer.store(builder.fptrunc(value, _HALVES), writer.moved(rows_c[i // 2], 32 * (i % 2)), 2)
        return context.get_dummy_value()

    @intrinsic
    def tiled(
        typing: Any, a: Any, k: Any, steps: Any, middles: Any, b: Any, sums: Any, scale: Any, bias: Any, c: Any,
        dc: Any, near: Any, dn: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 12), codegen

    return tiled


def scores(rows: int, registers: int) -> Any:
    """A loop (a, apart_a, keys, apart_keys, groups, out, apart_out, near): products of rows with 16 keys a step.

    Rows and keys are 32 * registers bfloat16 as they lie; out float32 [rows, 16 * groups]. As many bytes as are read
    are asked for from memory at `near`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, apart_a, keys, apart_keys, groups, out, apart_out, near = args
        writer = _Writer(context, builder)
        own = [
            [writer.load(writer.moved(row, 64 * i), PAIRS, 2) for i in range(registers)]
            for row in writer.rows(a, apart_a, rows)
        ]
        rows_out = writer.rows(out, apart_out, rows)

        def body(step: Any, places: list[Any], values: list[Any]) -> list[Any]:
            sums: list[list[tuple[int, Any]]] = [[] for _ in own]
            rows_near = writer.rows(places[1], apart_keys, LANES)
            for key, there in zip(writer.rows(places[0], apart_keys, LANES), rows_near, strict=True):
                for i in range(registers):
                    writer.prefetch(writer.moved(there, 64 * i), 2)
                parts = [writer.load(writer.moved(key, 64 * i), PAIRS, 2) for i in range(registers)]
                for row, merged in zip(own, sums, strict=True):
                    dots = ir.Constant(SUMS, [0.0] * LANES)
                    for x, y in zip(row, parts, strict=True):
                        dots = writer.dot(dots, x, y)
                    _merge(writer, merged, dots)
            along = builder.shl(step, number(6))
            for row, merged in zip(rows_out, sums, strict=True):
                writer.store(merged[0][1], builder.add(row, along), 4)
            return []

        moving = builder.shl(apart_keys, number(4))
        writer.loop(groups, [(keys, moving), (near, moving)], [], body)
        return context.get_dummy_value()

    @intrinsic
    def scored(typing: Any, a: Any, da: Any, keys: Any, dk: Any, n: Any, out: Any, do: Any, near: Any) -> Any:
        return types.void(*[types.int64] * 8), codegen

    return scored


def _merge(writer: _Writer, merged: list[tuple[int, Any]], vector: Any) -> None:
    """Takes one of LANES vectors; behind the last, lane i of what is left is the sum of all lanes of vector i.

    merged: (vectors, their lanes partly added) of sizes that fall; two of a size become one, as a counter carries.
    """
    unit = 1
    while merged and merged[-1][0] == unit:
        _, before = merged.pop()
        units = [list(range(at, at + unit)) for at in range(0, LANES, unit)]
        even, odd = ([lane + way for one in units[first::2] for way in (0, LANES) for lane in one] for first in (0, 1))
        vector = writer.builder.fadd(writer.shuffled(before, vector, even), writer.shuffled(before, vector, odd))
        unit *= 2
    merged.append((unit, vector))


COLUMNS = 64  # that add_rows takes at a time


def add_rows(rows: int) -> Any:
    """A loop (weights, apart_weights, values, apart, count, out, apart_out, near): out += weights @ values.

    A step takes a pair of weights (bfloat16) and two of `count` rows of values, `apart` bytes from one to the next;
    64 columns of them, bfloat16 as they lie. Behind an odd last row may lie anything: it is taken twice, so the second
    weight must be 0, and sums are those of a row of zeros there. out float32. near as in scores.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, apart_weights, values, apart, count, out, apart_out, near = args
        steps = builder.ashr(builder.add(count, number(1)), number(1))
        whole = builder.ashr(count, number(1))
        moving = builder.shl(apart, number(1))
        writer = _Writer(context, builder)
        rows_w, rows_out = writer.rows(weights, apart_weights, rows), writer.rows(out, apart_out, rows)
        # Instructions that unpack take 4 numbers of each 8, the low or the high ones; at the end order is restored.
        low, high = (
            [lane for part in range(at, 2 * LANES, 8) for i in range(part, part + 4) for lane in (i, i + 2 * LANES)]
            for at in (0, 4)
        )
        fours = [list(range(at, at + 4)) for at in (0, LANES, 4, LANES + 4)]

        def body(step: Any, places: list[Any], sums: list[Any]) -> list[Any]:
            columns = []
            second = builder.select(builder.icmp_signed("<", step, whole), apart, number(0))
            for there in (places[1], builder.add(places[1], apart)):
                for at in (0, 64):
                    writer.prefetch(writer.moved(there, at), 2)
            for at in (0, 64):
                x = writer.load(writer.moved(places[0], at), PAIRS, 2)
                y = writer.load(writer.moved(builder.add(places[0], second), at), PAIRS, 2)
                columns += [writer.shuffled(x, y, low), writer.shuffled(x, y, high)]
            along = builder.shl(step, number(2))
            pairs = [writer.spread(builder.add(row, along)) for row in rows_w]
            return [writer.dot(total, columns[i % 4], pairs[i // 4]) for i, total in enumerate(sums)]

        zero = ir.Constant(SUMS, [0.0] * LANES)
        reached = writer.loop(steps, [(values, moving), (near, moving)], [zero] * (4 * rows), body)
        for r, row in enumerate(rows_out):
            for v in range(4):
                x, y = reached[4 * r + v // 2 * 2 : 4 * r + v // 2 * 2 + 2]
                order = [lane + 8 * (v % 2) for four in fours for lane in four]
                address = writer.moved(row, 64 * v)
                writer.store(builder.fadd(writer.load(address, SUMS, 4), writer.shuffled(x, y, order)), address, 4)
        return context.get_dummy_value()

    @intrinsic
    def added(typing: Any, w: Any, dw: Any, v: Any, dv: Any, n: Any, out: Any, do: Any, near: Any) -> Any:
        return types.void(*[types.int64] * 8), codegen

    return added


def number(value: int) -> Any:
    return ir.Constant(_INT64, value)
