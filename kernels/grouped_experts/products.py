"""Launches of the two products: compiled here by the CuTe DSL, or taken from a library that build.py made elsewhere."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported

if TYPE_CHECKING:
    from flowinfer.kernels.grouped_experts import Blocks

LIBRARY = "FLOWINFER_GROUPED_EXPERTS"  # names a library of build.py, for machines without nvidia-cutlass-dsl
# Addresses of x, weights, out, tokens, owner, num_blocks; rows in, rows out, programs; stream.
Launch = Callable[[tuple[int, ...], tuple[int, int, int], int], None]


class Products:
    """Both products of experts of one size."""

    def __init__(self, hidden: int, width: int, num_experts: int) -> None:
        library = os.environ.get(LIBRARY, "")
        make = _from_library(Path(library)) if library else _compiled
        self._gated = make(hidden, width, num_experts, True)
        self._down = make(width, hidden, num_experts, False)

    def gated(self, x_TH: Tensor, gate_up_EOH: Tensor, out: Tensor, blocks: Blocks) -> None:
        """Arguments as checked by gated_rows."""
        _run(self._gated, x_TH, gate_up_EOH, out, blocks)

    def down(self, h_RI: Tensor, down_EHI: Tensor, out: Tensor, blocks: Blocks) -> None:
        """Arguments as checked by down_rows."""
        _run(self._down, h_RI, down_EHI, out, blocks)


def name_of(size_in: int, size_out: int, num_experts: int, gated: bool) -> str:
    """The symbol of a product in a library."""
    return f"flowinfer_{'gated' if gated else 'down'}_{num_experts}x{size_out}x{size_in}"


def _run(launch: Launch, rows: Tensor, weights: Tensor, out: Tensor, blocks: Blocks) -> None:
    tensors = rows, weights, out, blocks.tokens, blocks.owner, blocks.num_blocks
    programs = torch.cuda.get_device_properties(rows.device).multi_processor_count // 2 * 2  # they work in pairs
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    launch(tuple(tensor.data_ptr() for tensor in tensors), (len(rows), len(out), programs), stream)


def _compiled(size_in: int, size_out: int, num_experts: int, gated: bool) -> Launch:
    from flowinfer.kernels.grouped_experts.cute import compile_product, launcher

    launch: Launch = launcher(compile_product(size_in, size_out, num_experts, gated))
    return launch


def _from_library(path: Path) -> Callable[[int, int, int, bool], Launch]:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnsupported(f"{LIBRARY} names {path}, which can't be loaded: {error}.") from None

    def find(size_in: int, size_out: int, num_experts: int, gated: bool) -> Launch:
        name = name_of(size_in, size_out, num_experts, gated)
        try:
            run = getattr(library, name)
        except AttributeError:
            raise KernelUnsupported(
                f"{path} has no {name}.", help="python -m flowinfer.kernels.grouped_experts.build makes one."
            ) from None
        run.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
        run.restype = ctypes.c_int

        def launch(addresses: tuple[int, ...], sizes: tuple[int, int, int], stream: int) -> None:
            if code := run(*addresses, *sizes, stream):
                raise RuntimeError(f"{name} wasn't launched: CUDA error {code}.")

        return launch

    return find
