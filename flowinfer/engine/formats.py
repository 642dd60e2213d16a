"""How the weights of a folder are stored, told from config.json and the headers of its files. Never imports torch.

What can't be read is refused here, with what would do, before anything is loaded. Weights in FP8 stay so on GPUs that
have units for them, but for DeepSeek-V4's; elsewhere they become the model's dtype as they are loaded, and FP4 does
everywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from flowinfer.errors import ModelError

Format = Literal["plain", "fp8", "fp4"]


def _no_fp4(value: object) -> object:
    if value == "fp4":
        raise ValueError(
            "fp4 products need a GPU of compute capability 10.0 and a kernel that isn't there: leave `weights`"
            " out, and weights that are stored so become `dtype` as they are loaded"
        )
    return value


# A setting: weights as they are stored, or quantized as they are loaded; `-only` keeps no copy for many rows.
Weights = Annotated[Literal["checkpoint", "fp8", "int8", "int4", "int8-only", "int4-only"], BeforeValidator(_no_fp4)]


KVDtype = Literal["auto", "fp8"]  # a setting: keys and values as the model computes them, or a byte each
FP8: Literal["fp8"] = "fp8"  # the setting


def numbers_of(weights: str) -> str:
    """Which numbers a model with this setting computes with: "" for the checkpoint's own."""
    return "" if weights == "checkpoint" else weights.partition("-")[0]


Block = tuple[int, int]
Tensors = dict[str, "TensorInfo"]

BLOCK: Block = (128, 128)  # rows and columns that share an FP8 scale, where config.json doesn't say
FP4_COLUMNS = 32  # that share an FP4 scale
INDEX = "model.safetensors.index.json"
PLAIN = ("F64", "F32", "F16", "BF16")
SCALES = (".scale", ".weight_scale_inv")
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
_MOST_HEADER = 100 << 20  # bytes, as safetensors itself has it

# Names that other ways of quantizing leave in a checkpoint, and what the way is called.
_TRACES = {
    ".qweight": "AWQ or GPTQ",
    ".qzeros": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_2": "NVFP4",
    "_proj_blocks": "MXFP4",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
INSTEAD = (
    "Take the same model in bfloat16 or float32; `weights: int8` or `weights: int4` then quantizes it on a CPU,"
    " `weights: fp8` on a GPU."
)


class TensorInfo(NamedTuple):
    """dtype as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        total = 1
        for size in self.shape:
            total *= size
        return total


def read_tensors(folder: Path, skip: Iterable[str] = ()) -> Tensors:
    """The tensors of all *.safetensors of a folder by name, but of files named in skip.

    Raises ModelError naming a file that is missing or whose header can't be read.
    """
    tensors: Tensors = {}
    index = folder / INDEX
    for file in sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ():
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file} is missing.", help="Is the download complete?")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in skip:
            tensors |= _header_of(path)
    return tensors


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a safetensors file begin, and the entries of its header by name.

    Raises ModelError for a file that isn't one.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MOST_HEADER:
                raise ValueError(f"its header claims {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
    except (OSError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise _unreadable(path, error) from None
    return 8 + size, header


def _header_of(path: Path) -> Tensors:
    try:
        return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in header_of(path)[1].items()}
    except (KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} can't be read: {error}.", help="Is the download complete?")


def refuse_scheme(raw: Mapping[str, Any], *, fp8: bool) -> None:
    """Raises ModelError for a quantization_config that isn't read here. fp8: whether the family may have block FP8."""
    config = raw.get("quantization_config")
    if not config:
        return
    method = str(config.get("quant_method") or config.get("quant_algo") or "(none)")
    if method != "fp8" or not fp8:
        bits = config.get("bits") or config.get("w_bit")
        name = f"{method!r}{f' of {bits} bits' if bits else ''}"
        raise ModelError(f"quantization_config: quant_method {name} isn't supported.", help=INSTEAD)
    if config.get("fmt", "e4m3") != "e4m3":
        raise ModelError(f"quantization_config: fmt {config['fmt']!r} isn't supported.", help="Supported: 'e4m3'.")
    if config.get("scale_fmt") not in (None, "ue8m0", "float", "float32", "fp32"):
        scale = config["scale_fmt"]
        raise ModelError(f"quantization_config: scale_fmt {scale!r} isn't supported.", help="Supported: 'ue8m0'.")
    block_of(raw)


def block_of(raw: Mapping[str, Any]) -> Block:
    """Rows and columns of a square that shares one FP8 scale. Raises ModelError for what isn't two numbers."""
    size = (raw.get("quantization_config") or {}).get("weight_block_size", BLOCK)
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        text = f"quantization_config: weight_block_size {size!r} isn't supported."
        raise ModelError(text, help="Supported: two numbers, as in [128, 128]; one scale a tensor isn't.")
    return size[0], size[1]


def weight_format(name: str, weight: TensorInfo, scale: TensorInfo | None, block: Block = BLOCK) -> Format:
    """How this matrix is stored: plain, fp8 with a scale a block, or fp4 in pairs with one every 32 columns.

    Raises ModelError naming the tensor: a dtype that isn't known, scales that are missing, odd or too many.
    """
    if weight.dtype in PLAIN:
        if scale is not None:
            raise ModelError(f"{name} is {weight.dtype} and has scales, which only FP8 and FP4 weights have.")
        return "plain"
    kind: Format | None = "fp8" if weight.dtype == "F8_E4M3" else "fp4" if weight.dtype in ("I8", "U8") else None
    if kind is None:
        text = f"{name} is stored as {weight.dtype}, which isn't supported."
        raise ModelError(text, help=f"Supported: {', '.join(PLAIN)}, F8_E4M3 with scales, FP4 in pairs (I8, U8).")
    if scale is None:
        text = f"{name} is {weight.dtype} but has no scales."
        raise ModelError(text, help=f"They are named {' or '.join(SCALES)}: are all files of the model there?")
    if scale.dtype not in SCALE_DTYPES or (kind == "fp4" and scale.dtype == "BF16"):
        text = f"The scales of {name} are {scale.dtype}, which isn't supported."
        raise ModelError(text, help=f"Supported: {', '.join(SCALE_DTYPES[::2])}.")
    _check_shapes(name, kind, weight.shape, scale.shape, block)
    return kind


def _check_shapes(name: str, kind: Format, weight: tuple[int, ...], scale: tuple[int, ...], block: Block) -> None:
    if len(weight) != 2:
        raise ModelError(f"{name} has shape {list(weight)}: only matrices are stored in {kind.upper()}.")
    rows, columns = weight
    high, wide = (1, FP4_COLUMNS // 2) if kind == "fp4" else block  # two FP4 numbers a byte
    wanted = (-(-rows // high), -(-columns // wide))
    if scale != wanted:
        of = f"one every {FP4_COLUMNS} columns" if kind == "fp4" else f"one a block of {block[0]} x {block[1]}"
        text = f"The scales of {name} have shape {list(scale)}, expected {list(wanted)}: {of}."
        raise ModelError(text, help="Does config.json (weight_block_size) belong to these weights?")


def check_stored(tensors: Tensors, *, scaled: bool, block: Block = BLOCK) -> dict[Format, int]:
    """How many numbers are stored in each format. scaled: whether the family may have FP8 and FP4.

    Raises ModelError naming the first tensor that can't be read.
    """
    if trace := next((way for name in tensors for end, way in _TRACES.items() if name.endswith(end)), ""):
        raise ModelError(f"the weights are quantized by {trace}, which isn't supported.", help=INSTEAD)
    found: dict[Format, int] = {}
    for name, info in tensors.items():
        if name.endswith(SCALES) or not name.endswith(".weight"):
            continue
        scale = next((tensors[s] for s in (name.removesuffix(".weight") + end for end in SCALES) if s in tensors), None)
        kind = weight_format(name, info, scale, block) if scaled else check_plain(name, info)
        found[kind] = found.get(kind, 0) + info.num_elements * (2 if kind == "fp4" else 1)
    return found


def check_plain(name: str, info: TensorInfo) -> Format:
    """Raises ModelError for a tensor that isn't in a float of 16 bits or more."""
    if info.dtype not in PLAIN:
        text = f"{name} is stored as {info.dtype}, which isn't supported."
        raise ModelError(text, help=f"Supported: {', '.join(PLAIN)}. {INSTEAD}")
    return "plain"


PACKED: tuple[Format, ...] = ("fp8", "fp4")
UNITS: dict[Format, tuple[str, tuple[int, int]]] = {"fp8": ("FP8", (8, 9)), "fp4": ("FP4", (10, 0))}


def lacks(kind: Format, device: str, capability: tuple[int, int] | None, dense: bool = False) -> str:
    """Why weights in this format aren't multiplied as they are on this device, in words; empty where they are.

    dense: of a model whose FP8 products have a kernel: any but DeepSeek-V4, in bfloat16, with blocks of BLOCK.
    """
    name, (major, minor) = UNITS[kind]
    if device == "cpu":
        return f"a CPU has no {name} units"
    needs = f"{name} units need compute capability {major}.{minor}"
    if capability is None:
        return f"{needs}, and {device}'s isn't known"
    if capability < (major, minor):
        return f"{needs}; {device} has {capability[0]}.{capability[1]}"
    if kind == "fp8" and dense:
        return ""
    return f"there is no kernel for products of {name} weights{' of this model' if kind == 'fp8' else ''}"
