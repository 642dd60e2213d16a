"""Loops for a CPU: compiled by numba when they are first needed, kept on disk, and run on torch's own threads.

A kernel is a function of one pointer: eight-byte numbers, some of them addresses of tensors. Each thread of torch's
OpenMP pool calls it and takes its part of the work, so no second pool of threads competes for the cores. Rows are read
into float32 and written back in the tensor's dtype (bfloat16 or float32): a kernel is compiled once for both.

Where numba or OpenMP's entry point is missing, `missing()` says so, and the plain torch path runs instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowinfer.folders import cache_dir
from flowinfer.kernels.arch import FEATURES

_WIDE = {torch.float32: 1, torch.bfloat16: 0}  # how kernels are told what they read


@lru_cache
def missing() -> str:
    """What keeps kernels from running here, in words; empty where nothing does."""
    if find_spec("numba") is None:
        return "the package numba"
    return "" if _openmp() else "GOMP_parallel in torch's OpenMP"


def missing_pairs() -> str:
    """What keeps tiles of bfloat16 pairs from running here (see tiles), in words; empty where nothing does."""
    return missing_feature("avx512bf16")


@lru_cache
def missing_feature(feature: str) -> str:
    """What keeps tiles by this feature of a processor from running here; empty where nothing does."""
    from llvmlite import binding

    if binding.llvm_version_info < (16,):
        return "numba 0.62 or later"
    return "" if binding.get_host_cpu_features().get(feature) else f"a processor with {FEATURES[feature]}"


@lru_cache
def pairs_pay() -> bool:
    """Whether tiles of bfloat16 pairs are the fastest here: by AMX, oneDNN's products have eight times the rate."""
    if missing() or missing_pairs():
        return False
    from llvmlite import binding

    return not binding.get_host_cpu_features().get("amx-bf16")


@lru_cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch computes with: looked up through torch's library, which is bound to it."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    try:
        library = ctypes.CDLL(str(found[0]))
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        library.omp_get_thread_num.restype = library.omp_get_num_threads.restype = ctypes.c_int
    except (AttributeError, IndexError, OSError):
        return None
    return library


SMALL = 1 << 15  # numbers up to which one thread is done before another would have woken


class Kernel:
    """A cfunc of numba, run on all of torch's threads, or on one where there is little to do.

    It is compiled when its address is first asked for; a model asks for those that it needs as it is loaded.
    """

    def __init__(self, compile: Callable[[], Any]) -> None:
        openmp = _openmp()
        assert openmp is not None, "callers have looked at missing()"
        self._compile = compile
        self._parallel = openmp.GOMP_parallel

    @cached_property
    def address(self) -> int:
        """Of its machine code."""
        address: int = self._compile().address
        return address

    @cached_property
    def _alone(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, *numbers: int | Tensor, work: int) -> None:
        """Tensors go in as their addresses: contiguous ones that the caller keeps alive. work: numbers gone through."""
        values = np.array([n.data_ptr() if isinstance(n, Tensor) else n for n in numbers], np.int64)
        if work <= SMALL:
            self._alone(values.ctypes.data)
        else:
            self._parallel(self.address, values.ctypes.data, torch.get_num_threads(), 0)


def bits(value: float) -> int:
    """A real number as a kernel's argument; `loops.real` turns it back."""
    return int(np.float64(value).view(np.int64))


def wide(tensor: Tensor) -> int:
    """How a kernel reads this tensor. Raises KeyError for dtypes other than float32 and bfloat16."""
    return _WIDE[tensor.dtype]


class _Room(threading.local):
    """Room for the rows that kernels work on, kept from call to call: one for each thread that starts kernels."""

    def __init__(self) -> None:
        self.numbers = torch.empty(0)


_room = _Room()


def scratch(numbers: int) -> tuple[Tensor, int]:
    """Room for that many float32 numbers a thread, until the next call; and the bytes between two threads' rooms."""
    each = -(-numbers // 1024) * 1024  # whole pages: threads must not share lines of a cache
    needed = each * torch.get_num_threads()
    if _room.numbers.numel() < needed:
        _room.numbers = torch.empty(needed, dtype=torch.float32)
    return _room.numbers, each * 4


def kept_in() -> Path:
    """Where compiled code is kept: a folder for these very sources, since numba looks at the age of one file only."""
    here = Path(__file__).parent
    shared = (here / f"{name}.py" for name in ("compiled", "loops", "program", "tiles"))
    sources = sorted([*shared, *here.glob("*/cpu*.py")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return cache_dir() / "loops" / digest


def name_threads() -> None:
    """Makes OpenMP's questions known to what numba compiles."""
    from llvmlite import binding

    for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
        binding.add_symbol(name, ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value)
