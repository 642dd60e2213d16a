"""Reads tensors of a Hugging Face folder by name, from one or many safetensors files, without copying the files."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowinfer.engine.formats import INDEX, TensorInfo, check_plain
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


class Weights:
    """The tensors of a folder, memory-mapped. Use as a context manager; `finish` checks that nothing was left over."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._places = _places(folder)
        self._taken: set[str] = set()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.clear()
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the wanted dtype on the device. Raises ModelError naming one that is missing or misshapen.

        So it does for one of few bits: without its scales, its numbers mean nothing.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} has shape {list(tensor.shape)}, expected {list(shape)}.")
        check_plain(f"{self.folder}: {name}", info_of(tensor))
        self._taken.add(name)
        return tensor.to(self.device, self.dtype)

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

    def _read(self, name: str) -> Tensor:
        if name not in self:
            raise ModelError(f"{self.folder}: tensor {name} is missing.", help="Are all files of the model there?")
        tensor: Tensor = self._handle(self._places[name]).get_tensor(name)
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
