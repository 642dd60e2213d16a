"""Time from `flowinfer run` to ready, and resident memory of all its processes, with the model in the cache.

Run: python tests/bench/bench_start.py [pipeline [setting...]], as in prod.yaml vars.model=smollm2-135m. Bars for
prod.yaml: 15 s, 2.5 GB. Memory is what the processes keep from others (PSS: shared pages are counted once), measured
after answers of 16 streams.
"""

from __future__ import annotations

import statistics
import sys

import psutil
from harness import machine, service

ROUNDS = 3


def memory(pid: int) -> dict[str, float]:
    """Megabytes of each process of a service, by name."""
    root = psutil.Process(pid)
    return {_name(process): process.memory_full_info().pss / 1e6 for process in (root, *root.children(recursive=True))}


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[-1] if "worker_main" in " ".join(command) else "supervisor"


def main() -> None:
    """Prints the median start and the memory by process."""
    pipeline, *settings = sys.argv[1:] or ["prod.yaml"]
    print(machine())
    starts = []
    for _ in range(ROUNDS):
        with service(pipeline, *settings) as running:
            starts.append(running.started_s)
            running.all([(running.prompt_ids(256, i), 64) for i in range(16)])
            used = memory(running.process.pid)
    print(f"{' '.join([pipeline, *settings])}: ready after {statistics.median(starts):.1f} s (median of {ROUNDS})")
    print("  ".join(f"{name} {size:,.0f} MB" for name, size in used.items()) + f"  all {sum(used.values()):,.0f} MB")


if __name__ == "__main__":
    main()
