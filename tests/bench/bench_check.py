"""How long `flowinfer check` takes, whole processes: the shipped file, and 50 stages. On a busy machine read CPU."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 7
COMMAND = [sys.executable, "-c", "from flowinfer.cli import main; main()", "check"]


def fifty_stages() -> str:
    """The shipped pipeline with 42 more bucket-routes in a row."""
    prod = Path("pipelines/prod.yaml").read_text()
    names = [f"extra{i}" for i in range(42)]
    stages = "".join(f"  {name}: {{use: bucket-route}}\n" for name in names)
    chain = "".join(f"  {a} -> {b}:\n" for a, b in zip(["tokenize", *names], [*names, "route"], strict=True))
    text = prod.replace("stages:\n", "stages:\n" + stages)
    return text.replace("  tokenize -> route:\n", chain)


def measure(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    start, used = time.perf_counter(), cpu_of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, cpu_of_children() - used


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(fifty_stages())
        file.flush()
        bare = [sys.executable, "-c", "pass"]
        prod = [*COMMAND, "pipelines/prod.yaml"]
        for name, command in {"python -c pass": bare, "prod.yaml": prod, "50 stages": [*COMMAND, file.name]}.items():
            wall, cpu = zip(*(measure(command) for _ in range(RUNS)), strict=True)
            print(f"{name:<16} wall median {statistics.median(wall):.3f} s, best {min(wall):.3f} s", end="; ")
            print(f"CPU best {min(cpu):.3f} s")


if __name__ == "__main__":
    main()
