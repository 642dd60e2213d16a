"""Weights in every format of a DeepSeek-V4 load as the numbers they stand for; what can't be read is told by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flowinfer.engine.formats import TensorInfo, check_stored, lacks, read_tensors, refuse_scheme, weight_format
from flowinfer.engine.models.deepseek_v4.quant import dequantize
from flowinfer.engine.weights import Weights, info_of
from flowinfer.errors import ModelError

Pair = tuple[Tensor, Tensor, tuple[int, int]]  # weight, scales, block
SIZES = [(128, 128), (256, 384), (200, 300), (7, 96), (1, 32), (129, 64)]


def e4m3(rows: int, columns: int, scale: torch.dtype, block: tuple[int, int] = (128, 128)) -> Pair:
    """Any bytes but NaN, with scales of powers of two."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    return codes.view(torch.float8_e4m3fn), torch.exp2(torch.randint(-8, 8, blocks).float()).to(scale), block


def e2m1(rows: int, columns: int, packed: torch.dtype) -> Pair:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-8, 8, (rows, columns // 32)).float())
    return codes.view(packed), scales.to(torch.float8_e8m0fnu), (128, 128)


MAKERS: dict[str, Callable[[int, int], Pair]] = {
    "fp8, UE8M0": lambda r, c: e4m3(r, c, torch.float8_e8m0fnu),
    "fp8, float32": lambda r, c: e4m3(r, c, torch.float32),
    "fp8, bfloat16": lambda r, c: e4m3(r, c, torch.bfloat16),
    "fp8, other block": lambda r, c: e4m3(r, c, torch.float32, (16, 48)),
    "fp4, int8": lambda r, c: e2m1(r, c, torch.int8),
    "fp4, uint8": lambda r, c: e2m1(r, c, torch.uint8),
}


def one_by_one(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The formats as their definitions say, a number at a time."""
    fp4 = weight.dtype in (torch.int8, torch.uint8)
    codes, scales = weight.view(torch.uint8), scale.float()
    rows, columns = codes.shape[0], codes.shape[1] * (2 if fp4 else 1)
    out = torch.zeros(rows, columns)
    for r in range(rows):
        for c in range(columns):
            if fp4:
                code = int(codes[r, c // 2]) >> (4 * (c % 2)) & 15
                exponent, mantissa = code >> 1 & 3, code & 1
                value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                sign, factor = code >> 3, float(scales[r, c // 32])
            else:
                code = int(codes[r, c])
                exponent, mantissa = code >> 3 & 15, code & 7
                value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
                sign, factor = code >> 7, float(scales[r // block[0], c // block[1]])
            out[r, c] = (-value if sign else value) * factor
    return out


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [(7, 96), (33, 64)])
def test_numbers_are_those_of_the_definition(kind: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, scale, block = MAKERS[kind](*size)
    assert torch.equal(dequantize(weight, scale, block), one_by_one(weight, scale, block))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", SIZES)
def test_what_fits_is_accepted_and_anything_else_refused(kind: str, size: tuple[int, int]) -> None:
    rows, columns = size
    weight, scale, block = MAKERS[kind](rows, columns - columns % 32)
    info, scales = info_of(weight), info_of(scale)
    assert weight_format("w", info, scales, block) == kind[:3]
    for wrong in ((scale.shape[0] + 1, scale.shape[1]), (scale.shape[0], scale.shape[1] + 1), (), (scale.shape[1],)):
        with pytest.raises(ModelError, match="scales of w have shape"):
            weight_format("w", info, TensorInfo(scales.dtype, wrong), block)
    with pytest.raises(ModelError, match=r"w is .* but has no scales"):
        weight_format("w", info, None, block)
    with pytest.raises(ModelError, match="only matrices"):
        weight_format("w", TensorInfo(info.dtype, (2, *info.shape)), scales, block)


def test_scales_that_fit_by_chance_are_still_told_by_the_block() -> None:
    """Two scales for 300 rows could be halves of 150: that isn't what the file says it holds."""
    with pytest.raises(ModelError, match=r"expected \[3, 1\]"):
        weight_format("w", TensorInfo("F8_E4M3", (300, 100)), TensorInfo("F32", (2, 1)))


@pytest.mark.parametrize(
    ("weight", "scale", "words"),
    [
        ("F8_E5M2", "F32", "F8_E5M2, which isn't supported"),
        ("I32", "F16", "I32, which isn't supported"),
        ("BF16", "F32", "only FP8 and FP4 weights have"),
        ("F8_E4M3", "F16", "scales of w are F16"),
        ("I8", "BF16", "scales of w are BF16"),
        ("U8", "F8_E4M3", "scales of w are F8_E4M3"),
    ],
)
def test_other_dtypes_are_refused(weight: str, scale: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        weight_format("w", TensorInfo(weight, (128, 128)), TensorInfo(scale, (1, 1)))


@pytest.mark.parametrize(
    ("names", "way"),
    [
        (("qweight", "qzeros", "scales"), "AWQ or GPTQ"),
        (("weight_packed", "weight_scale"), "compressed-tensors"),
        (("weight", "weight_scale", "weight_scale_2"), "NVFP4"),
        (("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes"),
        (("weight", "SCB"), "bitsandbytes"),
    ],
)
def test_other_ways_of_quantizing_are_named(names: tuple[str, ...], way: str) -> None:
    tensors = {f"model.layers.0.mlp.up_proj.{name}": TensorInfo("I32", (4, 4)) for name in names}
    with pytest.raises(ModelError, match=f"by {way}") as told:
        check_stored(tensors, scaled=True)
    assert "bfloat16" in told.value.help and "weights: int4" in told.value.help
    blocks = {"model.layers.0.mlp.experts.down_proj_blocks": TensorInfo("U8", (4, 4))}
    with pytest.raises(ModelError, match="MXFP4"):
        check_stored(blocks, scaled=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq' of 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "'gptq' of 8 bits"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_configurations_that_arent_read_are_refused_with_what_would_do(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as told:
        refuse_scheme({"quantization_config": config}, fp8=True)
    assert told.value.help
    refuse_scheme({}, fp8=False)
    refuse_scheme({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, fp8=True)
    with pytest.raises(ModelError, match="'fp8'"):
        refuse_scheme({"quantization_config": {"quant_method": "fp8"}}, fp8=False)


def test_devices_are_told_what_they_lack() -> None:
    assert lacks("fp4", "cuda:0", (9, 0)) == "FP4 units need compute capability 10.0; cuda:0 has 9.0"
    assert lacks("fp8", "cuda:1", (8, 0)) == "FP8 units need compute capability 8.9; cuda:1 has 8.0"
    assert "no kernel" in lacks("fp8", "cuda:0", (9, 0))
    assert "isn't known" in lacks("fp8", "cuda:0", None)
    assert lacks("fp8", "cpu", None) == "a CPU has no FP8 units"


def test_headers_tell_what_the_files_hold(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({f"{name}.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors")
    assert read_tensors(tmp_path, skip=["b.safetensors"]) == {"a.weight": TensorInfo("BF16", (2, 3))}
    index = {"weight_map": {"a.weight": "a.safetensors", "c.weight": "c.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"c.safetensors is missing"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0no"])
def test_a_damaged_header_is_told_by_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors can't be read"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_a_family_without_scales_takes_no_few_bits_for_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a.weight": torch.ones(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with weights, pytest.raises(ModelError, match=r"a\.weight is stored as") as told:
        weights.take("a.weight", (2, 3))
    assert "bfloat16" in told.value.help
