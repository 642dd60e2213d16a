"""Decides which bucket a prompt belongs to, and which bucket a worker serves next. Knows no sockets.

BucketPolicy runs in the stage. BucketDispatch runs in the sender of an edge with `dispatch: bucket`, over its queues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import ceil

from flowinfer.errors import RequestError

Instance = int | str

QUANTUM_MS = 50.0  # what a bucket is granted in each round: the default step budget of prefill


class BucketPolicy:
    """Buckets by length. bounds: the most tokens of each bucket, ascending; counted: what is counted, for people."""

    def __init__(self, bounds: Mapping[str, int], counted: str = "prompt tokens") -> None:
        self.bounds = dict(bounds)
        self.counted = counted

    def choose(self, num_tokens: int) -> str:
        """The first bucket that holds num_tokens. Raises RequestError 400 where none does."""
        for bucket, bound in self.bounds.items():
            if num_tokens <= bound:
                return bucket
        raise RequestError(
            400,
            f"The prompt has {num_tokens} {self.counted}; this service takes at most {bound} (bucket {bucket!r}).",
            code="context_length_exceeded",
            param="messages",
        )


class BucketDispatch:
    """Matches waiting prompts with worker instances: each lane (bucket) has its share of them, and none idles.

    Lanes are dealt out to instances in turn, so each lane has home instances, or with fewer instances than lanes each
    instance has several home lanes, which it serves by deficit round-robin (Shreedhar & Varghese, SIGCOMM 1995) in
    predicted milliseconds: every round grants each waiting lane a quantum, and a lane sends once it has saved up its
    head's time. An instance that has nothing to do takes from any lane.
    """

    def __init__(
        self, lanes: tuple[str, ...], instances: int | Collection[Instance], quantum_ms: float = QUANTUM_MS
    ) -> None:
        self.lanes = lanes
        self.quantum_ms = quantum_ms
        self._deficit: dict[tuple[Instance, str], float] = {}
        self._last_sent: dict[Instance, int] = {}
        self._num_sent = 0
        self.resize(instances)

    def resize(self, instances: int | Collection[Instance]) -> None:
        """Deals the lanes out anew: to instances 0..n-1, or to these very ones (those alive)."""
        self._instances = list(range(instances)) if isinstance(instances, int) else sorted(set(instances), key=str)
        self._home: dict[Instance, list[str]] = {instance: [] for instance in self._instances}
        for i in range(max(len(self._instances), len(self.lanes)) if self._instances else 0):
            self._home[self._instances[i % len(self._instances)]].append(self.lanes[i % len(self.lanes)])
        self._deficit = {key: saved for key, saved in self._deficit.items() if key[0] in self._home}
        self._last_sent = {instance: sent for instance, sent in self._last_sent.items() if instance in self._home}

    def home(self, instance: Instance) -> tuple[str, ...]:
        """The lanes whose share this instance is; none for an instance that isn't counted."""
        return tuple(self._home.get(instance, ()))

    def choose(
        self, waiting: Mapping[str, float], ready: Collection[tuple[Instance, str]], idle: Collection[Instance]
    ) -> tuple[Instance, str] | None:
        """The next (instance, lane) to send the lane's head to, or None where nobody should get anything now.

        waiting: predicted milliseconds of the head of each lane that isn't empty. ready: pairs with credit.
        idle: instances with nothing in hand. Call it again, after sending, until it says None.
        """
        self._deficit = {
            key: saved for key, saved in self._deficit.items() if key[1] in waiting
        }  # the idle save nothing
        for instance in self._by_need(idle):
            open_lanes = [lane for lane in self.lanes if lane in waiting and (instance, lane) in ready]
            home = [lane for lane in open_lanes if lane in self._home[instance]]
            if lanes := home or (open_lanes if instance in idle else []):
                self._num_sent += 1
                self._last_sent[instance] = self._num_sent
                return instance, self._round_robin(instance, lanes, waiting)
        return None

    def _by_need(self, idle: Collection[Instance]) -> Iterable[Instance]:
        """Idle instances first, then those that were served least recently."""
        return sorted(self._instances, key=lambda i: (i not in idle, self._last_sent.get(i, 0)))

    def _round_robin(self, instance: Instance, lanes: list[str], waiting: Mapping[str, float]) -> str:
        """As many rounds at once as the first lane needs to afford its head; that lane pays."""
        if len(lanes) == 1:
            return lanes[0]
        saved = {lane: self._deficit.get((instance, lane), 0.0) for lane in lanes}
        rounds = {lane: max(0, ceil((waiting[lane] - saved[lane]) / self.quantum_ms)) for lane in lanes}
        chosen = min(lanes, key=lambda lane: (rounds[lane], -saved[lane]))
        for lane in lanes:
            self._deficit[instance, lane] = saved[lane] + rounds[chosen] * self.quantum_ms
        self._deficit[instance, chosen] -= waiting[chosen]
        return chosen
