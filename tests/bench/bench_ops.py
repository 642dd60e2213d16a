"""Every op of flowinfer/kernels by itself: time, bytes, arithmetic, and its share of what this card can do.

Run: PYTHONPATH=. python tests/bench/bench_ops.py [--only norm,rope] [--json F]
Calls of a case go over more memory than the caches hold and are replayed as one CUDA graph, so that starting them costs
nothing; an op that waits for the host is timed with that wait. Roofline: the longer of bytes at the card's own read
rate and arithmetic at its own bf16 rate, both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from op_cases import CASES, Case, Shape

from flowinfer.bench.rates import measure_rates, median_s
from flowinfer.bench.roofline import Op, Rates

REPEATS = 9
for _module in ("op_cases_more", "op_cases_v4"):
    import_module(_module)  # which enters its cases


def seconds(case: Case, device: torch.device) -> float:
    """Median of a call."""
    for call in case.calls[:2]:
        call()
    if not case.in_graph:
        return median_s(case.calls[0], device, repeats=REPEATS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in case.calls:
            call()
    return median_s(graph.replay, device, repeats=REPEATS) / len(case.calls)


def row(op: str, case: Case, rates: Rates, device: torch.device) -> dict[str, Any]:
    """A case, timed."""
    took = seconds(case, device)
    limit = Op(op, case.bytes, case.flops).seconds(rates)
    return {
        "op": op, "case": case.name, "us": took * 1e6, "bytes": case.bytes, "flops": case.flops,
        "tb_s": case.bytes / took / 1e12, "tflop_s": case.flops / took / 1e12, "share": limit / took,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"{row['op']:20} {row['case']:34} {row['us']:>9.1f} us {row['bytes'] / 1e6:>8.1f} MB "
        f"{row['flops'] / 1e9:>8.1f} GFLOP {row['tb_s']:>5.2f} TB/s {row['tflop_s']:>5.0f} TFLOP/s {row['share']:>4.0%}"
    )


def main() -> None:
    """Prints a line a case and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    rates, name = measure_rates(device, torch.bfloat16), torch.cuda.get_device_name()
    print(f"{name}: reads {rates.read / 1e12:.2f} TB/s, multiplies at {rates.matmul / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for op in args.only.split(","):
        torch.manual_seed(0)
        try:
            for case in CASES[op](Shape()):
                rows.append(row(op, case, rates, device))
                print(line(rows[-1]), flush=True)
        except Exception as error:  # one op that fails shall not hide the others
            print(f"{op:20} broke: {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()
        if args.json:
            found = {"device": name, "rates": [rates.read, rates.matmul], "rows": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
