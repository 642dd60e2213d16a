"""Names what computes on this machine, so that blocks of the batch-invariant mode never mix with other bytes.

Without torch: versions of packages, instruction sets of the CPU, models of the GPUs.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FORMAT = 3  # raised by hand when the arithmetic of the mode changes
_CPU = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_SETS = re.compile(r"(?:avx|amx|fma|sse4|f16c)\w*")


@cache
def kernel_set(device: str) -> str:
    """A name of at most 40 characters: device type, torch, and a digest of all that may change how sums are rounded."""
    parts = [str(FORMAT), device, _version("torch"), _version("triton" if device == "cuda" else "numba")]
    parts.append(_gpus() if device == "cuda" else _cpu())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"invariant {device} torch {parts[2].partition('+')[0]} {digest}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """Vendor, model and instruction sets: kernels are chosen by them."""
    text = _CPU.read_text(encoding="utf-8", errors="replace") if _CPU.exists() else ""
    first = text.partition("\n\n")[0]
    named = re.findall(r"^(?:vendor_id|model name|cpu family|model)\s*: (.*)$", first, re.MULTILINE)
    return " ".join([*named, *sorted(set(_SETS.findall(first)))])


def _gpus() -> str:
    """Models of the GPUs, as the driver names them."""
    files = sorted(_GPUS.glob("*/information")) if _GPUS.exists() else []
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return " ".join(sorted({found for text in texts for found in re.findall(r"^Model:\s*(.*)$", text, re.MULTILINE)}))
