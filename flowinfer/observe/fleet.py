"""The last samples of every worker, with counters that go on where a restarted worker begins again at nought."""

from __future__ import annotations

from collections.abc import Sequence

from flowinfer.observe.metrics import Sample

_WHOLE = "flowinfer:worker_restarts_total"  # each generation says it over all generations, so it isn't added up
_GROWING = ("_total", "_bucket", "_count", "_sum")  # what only grows, by its name
Key = tuple[str, tuple[tuple[str, str], ...]]


class Fleet:
    """Samples by worker. Without the offsets, sums over workers would fall when one dies, and rates leap."""

    def __init__(self) -> None:
        self._last: dict[str, Sequence[Sample]] = {}
        self._before: dict[str, dict[Key, float]] = {}  # what earlier generations of a worker had counted

    def update(self, worker: str, samples: Sequence[Sample]) -> None:
        """Takes the newest samples of a worker."""
        self._last[worker] = samples

    def down(self, worker: str) -> None:
        """A worker died: keeps its counts, forgets its levels."""
        before = self._before.setdefault(worker, {})
        for name, labels, value in self._last.pop(worker, ()):
            if name.endswith(_GROWING) and name != _WHOLE:
                key = _key(name, labels)
                before[key] = before.get(key, 0.0) + value

    def of(self, worker: str) -> Sequence[Sample]:
        """The newest samples of a worker, as it said them."""
        return self._last.get(worker, ())

    def samples(self) -> dict[str, list[Sample]]:
        """All samples by worker, with earlier generations added; also of workers that are down. For any thread."""
        return {worker: self._summed(worker) for worker in [*dict.fromkeys([*self._last, *self._before])]}

    def _summed(self, worker: str) -> list[Sample]:
        before = dict(self._before.get(worker, {}))
        now = [(name, labels, value + before.pop(_key(name, labels), 0.0)) for name, labels, value in self.of(worker)]
        return now + [(name, dict(labels), value) for (name, labels), value in before.items()]


def _key(name: str, labels: dict[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))
