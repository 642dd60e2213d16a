"""Reads tensors of a Hugging Face folder by name, from one or many safetensors files, without copying the files.

For a CPU the files are mapped; for a card their bytes go straight to where the model wants them, see card_reader.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowinfer.engine.card_reader import CardReader
from flowinfer.engine.formats import INDEX, SCALES, Block, TensorInfo, check_plain, header_of, weight_format
from flowinfer.engine.manifest import HEAD
from flowinfer.errors import ModelError

_MOST_NAMES = 5  # in an error message
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}


class Weights:
    """The tensors of a folder, memory-mapped. Use as a context manager; `finish` checks that nothing was left over."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: torch.device, scale_block: Block | None = None
    ) -> None:
        """scale_block: of FP8 weights, which `take` then gives as the numbers that they stand for."""
        self.folder = folder
        self.scale_block = scale_block
        self.dtype = dtype
        self.device = device
        self._files = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._places = _places(folder)
        self._taken: set[str] = set()
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._reader = CardReader(device) if device.type == "cuda" else None

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._reader is not None:
            self._reader.close()
        self._handles.clear()
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def take(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """The tensor in the wanted dtype on the device. Raises ModelError naming one that is missing or misshapen.

        So it does for one of few bits: without its scales, its numbers mean nothing.  out: memory for it, contiguous
        and of the wanted dtype; what is read there may be used after `settle`. Without it, a CPU maps the file.
        """
        info = self._info(name)
        if info.shape != shape:
            raise ModelError(f"{self.folder}: {name} has shape {list(info.shape)}, expected {list(shape)}.")
        if self.scale_block is not None and self.scale_of(name):
            wide = self._widened(name, self.scale_block)
            return wide if out is None else out.copy_(wide)
        check_plain(f"{self.folder}: {name}", info)
        self._taken.add(name)
        if self._reader is None:
            mapped = self._read(name)
            return mapped.to(self.device, self.dtype) if out is None else out.copy_(mapped)
        if _DTYPES[info.dtype] is not self.dtype:
            stored = self.moved(name)
            return stored.to(self.dtype) if out is None else out.copy_(stored)
        if out is not None:
            self._start(name, out)
            return out
        return self.moved(name)

    def scale_of(self, name: str) -> str:
        """The tensor that holds the scales of a weight; empty where it has none."""
        return next((s for s in (name.removesuffix(".weight") + end for end in SCALES) if s in self), "")

    def scaled(self, name: str, shape: tuple[int, ...], block: Block) -> tuple[Tensor, Tensor]:
        """The codes of an FP8 weight and its scales, on the device as the file has them. Raises ModelError."""
        info, scale = self._info(name), self.scale_of(name)
        if info.shape != shape:
            raise ModelError(f"{self.folder}: {name} has shape {list(info.shape)}, expected {list(shape)}.")
        weight_format(f"{self.folder}: {name}", info, self._info(scale) if scale else None, block)
        return self.moved(name), self.moved(scale)

    def _widened(self, name: str, block: Block) -> Tensor:
        from flowinfer.engine.models.deepseek_v4.quant import dequantize  # here: few checkpoints have scales

        codes, scale = self.scaled(name, self._info(name).shape, block)
        return dequantize(codes, scale, block, dtype=self.dtype)

    def settle(self) -> None:
        """What was taken into memory of the caller is there for all that is queued on the device from now on."""
        if self._reader is not None:
            self._reader.settle()

    def moved(self, name: str) -> Tensor:
        """The tensor on the device, in the file's dtype. Raises ModelError naming a missing tensor."""
        if self._reader is None:
            return self.raw(name).to(self.device)
        info = self._info(name)
        tensor = torch.empty(info.shape, dtype=_DTYPES[info.dtype], device=self.device)
        self._start(name, tensor)
        self._reader.settle()
        self._taken.add(name)
        return tensor

    def raw(self, name: str) -> Tensor:
        """The tensor as the file has it. Raises ModelError naming a missing tensor."""
        tensor = self._read(name)
        self._taken.add(name)
        return tensor

    def finish(self, ignore: tuple[str, ...] = (), skip: re.Pattern[str] | None = None) -> None:
        """Raises ModelError naming tensors that the model has no place for.

        ignore lists known harmless endings; skip matches the beginning of names that are another's.
        """
        left = sorted(name for name in self._places if name not in self._taken and not name.endswith(ignore))
        left = [name for name in left if not (skip and skip.match(name))]
        if left:
            raise ModelError(
                f"{self.folder}: unexpected tensors: {_list(left)}.", help="Does config.json belong to these weights?"
            )

    def _info(self, name: str) -> TensorInfo:
        entry = self._header(self._place(name))[1].get(name)
        if entry is None:
            raise self._missing(name)
        return TensorInfo(entry["dtype"], tuple(entry["shape"]))

    def _header(self, path: Path) -> tuple[int, dict[str, Any]]:
        if path not in self._headers:
            self._headers[path] = header_of(path)
        return self._headers[path]

    def _start(self, name: str, out: Tensor) -> None:
        path = self._place(name)
        first, entries = self._header(path)
        assert self._reader is not None, "for a card"
        self._reader.read(path, first + entries[name]["data_offsets"][0], out)

    def _place(self, name: str) -> Path:
        if name not in self:
            raise self._missing(name)
        return self._places[name]

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.folder}: tensor {name} is missing.", help="Are all files of the model there?")

    def _read(self, name: str) -> Tensor:
        place = self._place(name)
        tensor: Tensor = self._handle(place).get_tensor(name)
        return tensor

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._files.enter_context(_open(path))
        return self._handles[path]


def info_of(tensor: Tensor) -> TensorInfo:
    """A tensor as the header of its file describes it."""
    return TensorInfo(_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))


def _places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / INDEX
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != HEAD)
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors.", help="Other weight formats must be converted first.")
    places: dict[str, Path] = {}
    for path in files:
        with _open(path) as handle:
            places |= dict.fromkeys(handle.keys(), path)
    return places


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # here: made-up weights need it not

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} can't be read: {error}.", help="Is the download complete?") from None


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
