"""Block-scaled FP8 and FP4 to plain numbers: bit for bit the reference, over odd shapes, every code and every scale."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.dequantize import dequantize, dequantize_reference

torch.set_num_threads(1)
DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")
DTYPES = (torch.bfloat16, torch.float32)


def codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scales_of(dtype: torch.dtype, *shape: int) -> Tensor:
    exponents = codes(*shape, seed=1) % 60 + 97  # 2^-30 to 2^29
    powers = exponents.view(torch.float8_e8m0fnu)
    return powers if dtype is torch.float8_e8m0fnu else (powers.float() * (1 + codes(*shape) / 256)).to(dtype)


def same(got: Tensor, want: Tensor) -> None:
    """want: float32."""
    if DEVICE == "cpu" and got.dtype is torch.bfloat16:  # the interpreter cuts numbers off and doesn't round them
        want = (want.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(got.cpu().nan_to_num(nan=-12345.0), want.to(got.dtype).nan_to_num(nan=-12345.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(1, 1, (128, 128)), (130, 257, (128, 128)), (40, 70, (16, 24)), (300, 9, (256, 8)), (16, 512, (16, 512))],
)
def test_fp8(rows: int, columns: int, block: tuple[int, int], scaled: torch.dtype, dtype: torch.dtype) -> None:
    weight = codes(rows, columns).view(torch.float8_e4m3fn)
    scale = scales_of(scaled, -(-rows // block[0]), -(-columns // block[1]))
    same(
        dequantize(weight.to(DEVICE), scale.to(DEVICE), block, dtype=dtype), dequantize_reference(weight, scale, block)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 16), (9, 40), (3, 700)])
def test_fp4(rows: int, size: int, scaled: torch.dtype, dtype: torch.dtype) -> None:
    weight = codes(rows, size).view(torch.int8)
    scale = scales_of(scaled, rows, -(-size // 16))
    same(dequantize(weight.to(DEVICE), scale.to(DEVICE), dtype=dtype), dequantize_reference(weight, scale))


def test_every_code_and_every_power_of_two_is_read_right() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(1, -1)
    ones = torch.ones(1, 2)
    got = dequantize(weight.view(torch.float8_e4m3fn).to(DEVICE), ones.to(DEVICE), dtype=torch.float32)
    same(got, weight.view(torch.float8_e4m3fn).float())
    powers = torch.arange(256, dtype=torch.uint8).view(1, -1).view(torch.float8_e8m0fnu)
    two = torch.full((1, 256 * 16), 0x22, dtype=torch.int8)  # ones in pairs
    got = dequantize(two.to(DEVICE), powers.to(DEVICE), dtype=torch.float32)
    same(got, powers.float().repeat_interleave(32, 1))


def test_a_result_goes_where_it_is_wanted_and_nowhere_else() -> None:
    weight, scale = codes(6, 64).view(torch.float8_e4m3fn), scales_of(torch.float32, 1, 1)
    room = torch.full((8, 64), 7.0, device=DEVICE)
    dequantize(weight.to(DEVICE), scale.to(DEVICE), out=room[1:7])
    same(room[1:7], dequantize_reference(weight, scale))
    assert (room[[0, 7]] == 7).all()


@pytest.mark.parametrize(
    ("weight", "scale", "out"),
    [
        (torch.zeros(4, 4), torch.ones(1, 1), None),
        (torch.zeros(4, 4, dtype=torch.int8), torch.ones(1, 1), None),
        (torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1).half(), None),
        (torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1), torch.zeros(4, 4)),
        (torch.zeros(4, 4, dtype=torch.int8).t()[::2], torch.ones(2, 1), None),
    ],
    ids=["plain numbers", "missing scales", "odd scales", "another shape", "strides"],
)
def test_what_it_cannot_read_is_refused(weight: Tensor, scale: Tensor, out: Tensor | None) -> None:
    with pytest.raises(KernelUnsupported, match="dequantize"):
        dequantize(weight, scale, out=out)
