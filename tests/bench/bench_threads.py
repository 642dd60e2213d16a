"""What waiting threads cost each other: a step of products in one or two processes, by how long threads spin.

Run: python tests/bench/bench_threads.py [--rounds 5] [--rows 1]. Every process takes steps of 120 bfloat16 products of
576 x 576 with the threads given, at the same time; a number is the median of the slowest process's milliseconds a step.
`alone` and `crowded` are what FlowInfer gives its workers, `library` is OpenMP's own default. Settings take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from harness import machine

from flowinfer.runtime.threads import ALONE, CROWDED

KINDS: dict[str, dict[str, str]] = {
    "alone": ALONE,
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "crowded": CROWDED,
    "library": {},
}
CASES = ((1, 1), (1, 2), (2, 1), (2, 2))
_CHILD = """
import sys, time, torch
from flowinfer.engine.models.linear import make_linear
threads, rows = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
products = [make_linear(torch.randn(576, 576).bfloat16(), None) for _ in range(120)]
x = torch.randn(rows, 576).bfloat16()
with torch.inference_mode():
    for product in products:
        product(x)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    for _ in range(20):
        for product in products:
            product(x)
    print((time.perf_counter() - began) / 20 * 1e3)
"""


def measure(processes: int, threads: int, rows: int, settings: dict[str, str]) -> float:
    """Milliseconds a step of the slowest of these processes."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_", "KMP_"))}
    command = [sys.executable, "-c", _CHILD, str(threads), str(rows)]
    started = [
        subprocess.Popen(
            command, env=plain | settings | {"OMP_NUM_THREADS": str(threads)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in started)


def main() -> None:
    """Prints a row a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    print(f"{machine()}; {args.rows} rows, median of {args.rounds}")
    print(f"| processes x threads | {' | '.join(f'{kind}, ms' for kind in KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for processes, threads in CASES:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for kind, settings in KINDS.items():
                found[kind].append(measure(processes, threads, args.rows, settings))
        cells = " | ".join(f"{statistics.median(times):.1f}" for times in found.values())
        print(f"| {processes} x {threads} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
