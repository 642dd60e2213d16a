"""Who goes to arm B, and when arm B has to stop. Pure: requests and outcomes in, decisions out.

A session is placed by a hash of its name and the experiment's, so that it stays in its arm as long as the share doesn't
shrink below it, whatever restarts meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Sequence

from flowinfer.experiment.outcome import Outcome
from flowinfer.message import Call
from flowinfer.spec.limits import ArmLimit

WINDOW = 2_000  # the newest requests of each arm that a limit looks at
# Bounds of 99 % on either side: the rule looks again and again, and each look may be wrong by chance.
Z = 2.576
LOOK_EVERY = 1.05  # growth of arm B's requests between two looks


def session_of(call: Call) -> str:
    """What a request belongs to: the session that it names, else the beginning of its chat, else itself.

    The beginning is all up to the first turn of the user, which later requests of the same conversation repeat.
    """
    if call.session:
        return call.session
    if call.messages:
        first = next((i for i, m in enumerate(call.messages) if m.get("role") == "user"), len(call.messages) - 1)
        return json.dumps(call.messages[: first + 1], sort_keys=True, default=str) + call.cache_salt
    return call.id.partition("#")[0]  # choices of one request stay together


def place(session: str, experiment: str) -> float:
    """Where a session stands between 0 and 1, evenly spread over sessions."""
    digest = hashlib.blake2b(f"{experiment}\0{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def name_of(session: str) -> str:
    """A short name that tells nothing of the session."""
    return hashlib.blake2b(session.encode(), digest_size=6).hexdigest()


class Judge:
    """Tells when arm B breaks a limit: once each arm has `min_requests`, and when it is sure by a 99 % bound."""

    def __init__(self, limits: Sequence[ArmLimit], min_requests: int) -> None:
        self._limits, self._min = tuple(limits), min_requests
        self._seen: dict[str, deque[Outcome]] = {arm: deque(maxlen=WINDOW) for arm in "ab"}
        self._next = 0.0
        self._num_b = 0

    def take(self, outcome: Outcome) -> str:
        """Notes an outcome; returns the limit that is broken, in words, or nothing."""
        if not self._limits:
            return ""
        self._seen[outcome.arm].append(outcome)
        self._num_b += outcome.arm == "b"
        a, b = self._seen["a"], self._seen["b"]
        needs_a = any(limit.relative for limit in self._limits)
        if len(b) < self._min or (needs_a and len(a) < self._min) or self._num_b < self._next:
            return ""
        self._next = self._num_b * LOOK_EVERY
        return next((reason for limit in self._limits if (reason := broken(limit, a, b))), "")


def broken(limit: ArmLimit, a: Sequence[Outcome], b: Sequence[Outcome]) -> str:
    """How arm B breaks the limit, in words, or nothing."""
    if limit.name == "errors":
        failed, bound = sum(o.failed for o in b), limit.bound
        if limit.relative:
            bound *= wilson(sum(o.failed for o in a), len(a))[1]
        low = wilson(failed, len(b))[0]
        return f"{limit.text}: {failed} of {len(b)} requests failed" if low > bound else ""
    what = limit.name.partition("_")[0]
    mine = sorted(value for o in b if (value := o.figure(what)) is not None)
    theirs = sorted(value for o in a if (value := o.figure(what)) is not None)
    if not mine or (limit.relative and not theirs):
        return ""
    base = percentile(theirs, limit.rank) if limit.relative else 1.0
    if lower_bound(mine, limit.rank) <= limit.bound * base:
        return ""
    value = percentile(mine, limit.rank)
    told = f"{value * 1e3:.0f} ms" + (f", {value / base:.2f}x of arm A's" if limit.relative and base else "")
    return f"{limit.text}: it is {told}, over {len(mine)} requests"


def wilson(failed: int, total: int) -> tuple[float, float]:
    """Bounds of a share (Wilson 1927); 0 and 1 where there is nothing to count."""
    if not total:
        return 0.0, 1.0
    share, z2 = failed / total, Z * Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return (0.0 if not failed else middle - reach), (1.0 if failed == total else middle + reach)


def percentile(ordered: Sequence[float], rank: float) -> float:
    """By nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(rank * len(ordered)) - 1))]


def lower_bound(ordered: Sequence[float], rank: float) -> float:
    """What the percentile is at least: the order statistic below it by Z deviations of a binomial count."""
    n = len(ordered)
    index = math.floor(n * rank - Z * math.sqrt(n * rank * (1 - rank))) - 1
    return ordered[index] if index >= 0 else 0.0
