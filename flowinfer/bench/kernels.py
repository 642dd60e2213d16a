"""Where the device's time goes in a step: its kernels by name, over a few steps of a running benchmark."""

from __future__ import annotations

from collections import defaultdict

from torch.profiler import ProfilerActivity, profile

PROFILED = 4  # steps


class Kernels:
    """Profiles PROFILED steps once `after` steps have been seen. found: (name, calls a step, microseconds a step)."""

    def __init__(self, after: int) -> None:
        self.found: list[tuple[str, float, float]] = []
        self._after = after
        self._profile: profile | None = None
        self._began = 0

    def watch(self, num_steps: int) -> None:
        """To be called after each turn of the loop with the steps seen so far."""
        if self.found or num_steps < self._after:
            return
        if self._profile is None:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
            self._began = num_steps
        elif num_steps >= self._began + PROFILED:
            self._profile.__exit__(None, None, None)
            self.found = summed(self._profile, num_steps - self._began)


def summed(seen: profile, steps: int) -> list[tuple[str, float, float]]:
    """(name, calls a step, microseconds a step) of each kernel, the longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.events() or ():
        totals[event.name][0] += 1
        totals[event.name][1] += event.device_time
    rows = [(name, calls / steps, us / steps) for name, (calls, us) in totals.items() if us]
    return sorted(rows, key=lambda row: -row[2])
