"""E4M3 inside Triton kernels: codes become bfloat16 on their way from memory, and numbers codes on their way back."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # the interpreter has no inline assembly
MOST = tl.constexpr(448.0)
# Four codes to bfloat16: exponent and fraction go where bfloat16 has them, which divides by 2^120, exactly undone.
_WIDEN = tl.constexpr("""
{
.reg .b32 a<4>, scale, zero;
mov.b32 scale, 0x7b807b80;
mov.b32 zero, 0x80008000;
prmt.b32 a0, $2, 0, 0x9180;
prmt.b32 a1, $2, 0, 0xb3a2;
shl.b32 a0, a0, 4;
shl.b32 a1, a1, 4;
and.b32 a2, a0, 0x87f087f0;
and.b32 a3, a1, 0x87f087f0;
fma.rn.bf16x2 $0, a2, scale, zero;
fma.rn.bf16x2 $1, a3, scale, zero;
}
""")


@triton.jit
def wide(codes, FAST: tl.constexpr):
    """The numbers of a tile of codes in bfloat16, exactly. FAST: not in the interpreter."""
    if FAST:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return codes.to(tl.float32).to(tl.bfloat16)


@triton.jit
def numbers(tile, FAST: tl.constexpr):
    """A tile of keys or values as it is multiplied: codes widened, anything else as it is."""
    if tile.dtype == tl.float8e4nv:
        tile = wide(tile, FAST)
    return tile


@triton.jit
def stored(tile, at):
    """A tile in the dtype of the memory that `at` points to; what E4M3 can't hold becomes its largest number."""
    if at.dtype.element_ty == tl.float8e4nv:
        tile = tl.minimum(tl.maximum(tile.to(tl.float32), -MOST), MOST)
    return tile.to(at.dtype.element_ty)
