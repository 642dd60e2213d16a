"""What this device reads and multiplies, measured: the two numbers under every roofline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from flowinfer.bench.roofline import Rates


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Medians of a sum over memory far larger than any cache, and of a large square matrix product."""
    cuda = device.type == "cuda"
    memory = torch.ones(1 << (30 if cuda else 27), dtype=torch.float32, device=device)
    read = memory.nbytes / median_s(memory.sum, device, repeats=15 if cuda else 5)
    del memory
    size = 8192 if cuda else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return Rates(read, 2.0 * size**3 / median_s(lambda: a @ b, device))


def median_s(run: Callable[[], object], device: torch.device, *, repeats: int = 15) -> float:
    """Median seconds of a call, after three that don't count."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)
