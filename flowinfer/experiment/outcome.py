"""What came of one request of an experiment, and of a pair of them. Plain data, as it is recorded."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, omit_defaults=True, tag="outcome", kw_only=True):
    """One request. at: seconds since 1970 when it was admitted; first, last, ended: seconds from then, None for never.

    session: a name of its session that tells nothing of it.  status: of the error, 0 without one.
    """

    arm: str
    session: str
    at: float
    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    error: str = ""
    status: int = 0

    @property
    def failed(self) -> bool:
        """True where the service failed; a request that it refuses for its content (400) is none."""
        return self.status >= 500

    def figure(self, what: str) -> float | None:
        """Seconds: `ttft` to the first token, `itl` each token behind it, `latency` to the end; None without."""
        if self.error:
            return None
        if what == "ttft":
            return self.first
        if what == "latency":
            return self.ended
        if self.first is None or self.last is None or self.completion_tokens < 2 or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)


class Pair(msgspec.Struct, omit_defaults=True, tag="pair", kw_only=True):
    """A request and its copy. at: the first token (or character) to differ, None where the answers are the same.

    shared: characters of what both texts begin with. The texts are there for the first few that differ.
    """

    a: Outcome
    b: Outcome
    at: int | None = None
    unit: str = "token"
    shared: int = 0
    text_a: str = ""
    text_b: str = ""


class Run(msgspec.Struct, omit_defaults=True, tag="run", kw_only=True):
    """The head of a record. at: seconds since 1970; changes: a unified diff from arm A to arm B."""

    service: str
    name: str
    mode: str
    share: float
    at: float
    changes: str = ""
    stop_if: dict[str, str] = {}


class Memory(msgspec.Struct, tag="memory"):
    """Bytes of resident memory of the workers that each arm needs, at one time."""

    a: int
    b: int


class End(msgspec.Struct, omit_defaults=True, tag="end", kw_only=True):
    """The experiment is over. reason: why; dropped: copies that weren't sent, by reason."""

    at: float
    reason: str = ""
    dropped: dict[str, int] = {}


Line = Run | Outcome | Pair | Memory | End
