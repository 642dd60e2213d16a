"""Inter-token latency of eight running streams while a 4,000-token prompt is prefilled: time budget or token budget.

Run: python tests/bench/bench_budget.py. Prefill and decode share one worker (colocated.yaml), so a chunk delays the
next decode step by its own length: the bar is budget + one decode step at the 99th percentile.
"""

from __future__ import annotations

import statistics
import threading

from harness import Service, Stream, machine, percentile, prompt_ids, service

STREAMS, NEW, LONG = 8, 160, 4000
BUDGET_MS = 50.0
CASES = {
    f"step_budget: {BUDGET_MS:.0f}ms": (f"stages.prefill.with.step_budget={BUDGET_MS:.0f}ms",),
    "token_budget: 8k": ("stages.prefill.with.token_budget=8192",),
}


def measure(running: Service, seed: int) -> tuple[list[float], list[float], Stream]:
    """Gaps of the streams without and with the long prompt among them, and the long one."""
    quiet = running.all([(prompt_ids(32, seed + i), 48) for i in range(STREAMS)])
    alone = [gap for stream in quiet for gap in stream.gaps[2:]]
    streams: list[Stream] = []
    background = threading.Thread(
        target=lambda: streams.extend(running.all([(prompt_ids(32, seed + 50 + i), NEW) for i in range(STREAMS)]))
    )
    background.start()
    threading.Event().wait(1.0)  # the streams are under way
    long = running.complete(prompt_ids(LONG, seed + 99), 1)
    background.join()
    during = [
        b - a
        for stream in streams
        for a, b in zip(stream.tokens, stream.tokens[1:], strict=False)
        if b > long.asked and a < long.tokens[0]
    ]
    return alone, during, long


def main() -> None:
    """Prints one line a case."""
    print(machine())
    print(f"{'case':<20} {'decode step ms':>14} {'p50 ms':>8} {'p99 ms':>8} {'bar ms':>8} {'long prompt TTFT s':>19}")
    for name, settings in CASES.items():
        plain = ("stages.verify.with.draft=none", "workers.engine.threads=2")
        with service("colocated.yaml", *plain, *settings) as running:
            measure(running, 0)  # the step-time model learns
            alone, during, long = measure(running, 1000)
        step = statistics.median(alone) * 1e3
        p50, p99 = (percentile(during, share) * 1e3 for share in (0.5, 0.99))
        print(f"{name:<20} {step:>14.1f} {p50:>8.1f} {p99:>8.1f} {BUDGET_MS + step:>8.1f} {long.ttft:>19.2f}")


if __name__ == "__main__":
    main()
