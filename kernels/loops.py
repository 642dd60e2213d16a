"""What compiled kernels are made of: rows in and out of memory, the part of a thread, exp. Imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from flowinfer.kernels import compiled

compiled.name_threads()
config.CACHE_DIR = str(compiled.kept_in())

_I16, _I32, _F32, _F64 = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.DoubleType()
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}  # what leaves NaN and infinity as they are
_ARGUMENTS = types.void(types.CPointer(types.int64))

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
_barrier = types.ExternalFunction("GOMP_barrier", types.void())


def kernel(function: Callable[[Any], None]) -> compiled.Kernel:
    """A kernel that is compiled when it is needed, or taken from where an earlier process has kept it."""

    def compile() -> Any:
        try:
            return cfunc(_ARGUMENTS, cache=True)(function)
        except RuntimeError:  # no folder can be written to
            return cfunc(_ARGUMENTS)(function)

    return compiled.Kernel(compile)


def loop(function: Callable[..., Any]) -> Any:
    """A part of a kernel. Sums are added in an order that the compiler chooses, the same for all rows of one length."""
    return njit(fastmath=_FAST, error_model="numpy")(function)


def part(function: Callable[..., Any]) -> Any:
    """A loop that is copied to where it is called: constants among its arguments are constants in it."""
    return njit(fastmath=_FAST, error_model="numpy", inline="always")(function)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as carray takes it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def _prefetch_line(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, number = context.get_value_type(types.voidptr), ir.IntType(32)
        wanted = ir.FunctionType(ir.VoidType(), [line, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [line], wanted)
        read, near, data = (ir.Constant(number, value) for value in (0, 2, 1))
        builder.call(function, [builder.inttoptr(args[0], line), read, near, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def real(typing: Any, bits: Any) -> Any:
    """The number whose bits an argument has."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptrunc(builder.bitcast(args[0], _F64), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def widened(typing: Any, bits: Any) -> Any:
    """The float32 that 16 bits of bfloat16 stand for."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(types.uint16), codegen


@intrinsic
def narrowed(typing: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN, in the form that arithmetic makes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def narrowed_up(typing: Any, value: Any) -> Any:
    """As narrowed, ties away from zero: half the work."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.add(builder.bitcast(args[0], _I32), ir.Constant(_I32, 0x8000))
        return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def rank(typing: Any, value: Any) -> Any:
    """An int32 for a float32, in the same order: compilers search for the largest int in vectors, floats one by one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _flip(builder, builder.bitcast(args[0], _I32))

    return types.int32(types.float32), codegen


@intrinsic
def of_rank(typing: Any, ranked: Any) -> Any:
    """The float32 of a rank."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_flip(builder, args[0]), _F32)

    return types.float32(types.int32), codegen


def _flip(builder: Any, bits: Any) -> Any:
    """Negative numbers the other way round: the sign stays."""
    negative = builder.ashr(bits, ir.Constant(_I32, 31))
    return builder.xor(bits, builder.and_(negative, ir.Constant(_I32, 0x7FFFFFFF)))


@intrinsic
def times_power(typing: Any, value: Any, exponent: Any) -> Any:
    """value * 2 ** exponent by adding to its exponent: both it and the result must be normal numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        return builder.bitcast(builder.add(bits, builder.shl(args[1], ir.Constant(_I32, 23))), _F32)

    return types.float32(types.float32, types.int32), codegen


@loop
def prefetch(address, count):
    """Starts the way of that many bytes from memory to the second cache."""
    for line in range(0, count, 64):
        _prefetch_line(address + line)


@loop
def read_row(address, count, wide, out):
    """count numbers at an address into float32 out."""
    if wide:
        single = carray(pointer(address), count, np.float32)
        for i in range(count):
            out[i] = single[i]
    else:
        half = carray(pointer(address), count, np.uint16)
        for i in range(count):
            out[i] = widened(half[i])


@loop
def write_row(row, count, wide, address):
    """And back."""
    if wide:
        single = carray(pointer(address), count, np.float32)
        for i in range(count):
            single[i] = row[i]
    else:
        half = carray(pointer(address), count, np.uint16)
        for i in range(count):
            half[i] = narrowed(row[i])


@loop
def exp2(x):
    """2 ** x for x <= 127, within 2 ulp: the polynomial of Cephes (Moshier); below -126 as there, about 1e-38."""
    x = max(x, np.float32(-126))
    power = np.int32(x + np.float32(0.5) if x > np.float32(0) else x - np.float32(0.5))
    f = x - np.float32(power)
    p = np.float32(1.535336188e-4)
    p = p * f + np.float32(1.339887440e-3)
    p = p * f + np.float32(9.618437357e-3)
    p = p * f + np.float32(5.550332471e-2)
    p = p * f + np.float32(2.402264791e-1)
    p = p * f + np.float32(6.931472028e-1)
    return times_power(np.float32(p * f + np.float32(1)), power)


@loop
def exp(x):
    """e ** x, outside of -87 to 88 as at the nearer end."""
    return exp2(min(x, np.float32(88)) * np.float32(1.4426950408889634))


@loop
def rough_exp2(x):
    """2 ** x for x <= 0 within 8e-5, a twenty-fifth of what bfloat16 loses: a cubic, fitted to the relative error."""
    x = max(x, np.float32(-126))
    power = np.int32(x - np.float32(0.5))
    f = x - np.float32(power)
    p = np.float32(0.05508868) * f + np.float32(0.24260405)
    p = p * f + np.float32(0.69327624)
    return times_power(np.float32(p * f + np.float32(0.99992894)), power)


@loop
def largest(x, n):
    """The largest of n float32."""
    most = rank(np.float32(-np.inf))
    for i in range(n):
        each = rank(x[i])
        most = each if each > most else most
    return of_rank(most)


@loop
def fill(x, first, last, value):
    """Numbers from first to before last."""
    for i in range(first, last):
        x[i] = value


@loop
def scale(x, n, by):
    """x *= by."""
    for i in range(n):
        x[i] *= by


@intrinsic
def _call(typing: Any, address: Any, argument: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = context.get_value_type(types.voidptr)
        kind = ir.FunctionType(ir.VoidType(), [place])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], place)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel
def run_phases(arguments):
    """Kernels by their addresses, and their arguments', one after the other: see program."""
    phases, first, last = carray(arguments, 3)
    rows = carray(pointer(phases), (last, 3), np.int64)
    for i in range(first, last):
        address, numbers, waits = rows[i]
        _call(address, numbers)
        if waits:
            _barrier()
