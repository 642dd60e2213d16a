"""Which GPUs this machine has, told without torch, and which devices of a plan aren't among them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from flowinfer.errors import Mark, Problem, SpecError
from flowinfer.graph.plan import Plan, WorkerPlan

CUDA = "cuda:"
Capability = tuple[int, int]
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # of AMD's driver
_DEV = Path("/dev")


@functools.cache
def count_gpus() -> int:
    """GPUs that a worker here could use as cuda:0, cuda:1, ...: NVIDIA's by NVML or device files, AMD's by sysfs."""
    if _is_cpu_torch():
        return 0
    return visible(_by_nvml() or _by_files() or _by_kfd(), os.environ)


def visible(count: int, environ: Mapping[str, str]) -> int:
    """How many of `count` GPUs CUDA_VISIBLE_DEVICES leaves: it lists ids, and ends at the first that isn't there."""
    listed = environ.get("CUDA_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    if listed is None:
        return count
    ids = [entry.strip() for entry in listed.split(",")]
    known = [not entry.isdigit() or int(entry) < count for entry in ids if entry and not entry.startswith("-")]
    end = min((i for i, entry in enumerate(ids) if not entry or entry.startswith("-")), default=len(ids))
    return min(count, next((i for i, is_known in enumerate(known[:end]) if not is_known), end))


def capability(device: str) -> Capability | None:
    """Compute capability of cuda:N as NVML tells it; None for anything else, and where it can't be told."""
    if not device.startswith(CUDA):
        return None
    return _capability(_physical(int(device.removeprefix(CUDA)), os.environ))


def _physical(index: int, environ: Mapping[str, str]) -> int:
    """The driver's number of a GPU that CUDA_VISIBLE_DEVICES may have renamed; -1 where it's named by its id."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return index
    ids = [entry.strip() for entry in listed.split(",")]
    return int(ids[index]) if index < len(ids) and ids[index].isdigit() else -1


@functools.cache
def _capability(index: int) -> Capability | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if index < 0 or nvml.nvmlInit_v2() != 0:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)


def missing(device: str, num_gpus: Callable[[], int] = count_gpus) -> str:
    """Why a worker can't run on this device here, "" if it can. num_gpus is asked only about a GPU."""
    if not device.startswith(CUDA):
        return ""
    count = num_gpus()
    if int(device.removeprefix(CUDA)) < count:
        return ""
    has = f"only cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0" if count else "no GPU that torch can use"
    return f"there is no {device} here: this machine has {has}"


def missing_devices(plan: Plan, num_gpus: Callable[[], int] = count_gpus) -> list[Problem]:
    """A problem for each worker whose device isn't on this machine."""
    found = ((worker, missing(worker.device, num_gpus)) for worker in plan.workers.values())
    return [_problem(worker, reason) for worker, reason in found if reason]


def refuse_missing(plan: Plan) -> None:
    """Raises SpecError when a worker's device isn't on this machine."""
    if problems := missing_devices(plan):
        raise SpecError(problems)


def _problem(worker: WorkerPlan, reason: str) -> Problem:
    message = f"Worker `{worker.name}` can't run: {reason}."
    file, line, column = [*worker.mark.rsplit(":", 2), "", ""][:3]
    mark = Mark(file, int(line), int(column)) if line.isdigit() and column.isdigit() else None
    return Problem("FI414", message, mark, "Use device: auto or cpu, or run it on a machine that has it.")


def _is_cpu_torch() -> bool:
    """True for a torch that was built without GPUs, as its version tells."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch").endswith("+cpu")
    return True


def _by_nvml() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value


def _by_files() -> int:
    return sum(path.name.removeprefix("nvidia").isdigit() for path in _DEV.glob("nvidia[0-9]*"))


def _by_kfd() -> int:
    """Nodes with compute units; the CPU is a node without."""
    count = 0
    for path in _KFD.glob("*/properties"):
        with contextlib.suppress(OSError):
            units = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("simd_count ")]
            count += bool(units and units[0] != "0")
    return count
