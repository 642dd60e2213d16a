"""p99 time to first token of short prompts under a mix with huge ones, with bucket-route and without.

Run: python tests/bench/bench_buckets.py. One prefill worker (prod.yaml); huge prompts keep it busy all the time, and
short prompts come at random moments.
"""

from __future__ import annotations

import random
import statistics
import threading

from harness import Service, machine, percentile, prompt_ids, service

SHORT, HUGE, NUM_SHORT, NUM_HUGE = 100, 6000, 40, 6
MODEL = "vars.model=smollm2-135m"
CASES = {
    "with bucket-route": ("prod.yaml", MODEL, "stages.route.with.buckets={short: 512, huge: 8k}"),
    "without": ("experiments/first-come.yaml", MODEL),
}


def measure(running: Service, seed: int) -> list[float]:
    """Times to first token of the short prompts."""
    rng = random.Random(seed)
    huge = threading.Thread(
        target=lambda: running.all([(prompt_ids(HUGE, seed + i), 1) for i in range(NUM_HUGE)]), daemon=True
    )
    huge.start()
    threading.Event().wait(0.5)
    times: list[float] = []
    threads = []
    for i in range(NUM_SHORT):
        if not huge.is_alive():
            break
        thread = threading.Thread(
            target=lambda i=i: times.append(running.complete(prompt_ids(SHORT, seed + 100 + i), 1).ttft)  # type: ignore[misc]
        )
        thread.start()
        threads.append(thread)
        threading.Event().wait(rng.uniform(0.1, 0.5))
    for thread in threads:
        thread.join()
    huge.join()
    return times


def main() -> None:
    """Prints one line a case."""
    print(machine())
    print(f"{'case':<20} {'short prompts':>14} {'TTFT p50 ms':>12} {'TTFT p99 ms':>12}")
    for name, (pipeline, *settings) in CASES.items():
        with service(pipeline, *settings) as running:
            running.all([(prompt_ids(SHORT, 7 + i), 1) for i in range(4)])
            times = measure(running, 1000)
        p50, p99 = statistics.median(times) * 1e3, percentile(times, 0.99) * 1e3
        print(f"{name:<20} {len(times):>14} {p50:>12.0f} {p99:>12.0f}")


if __name__ == "__main__":
    main()
