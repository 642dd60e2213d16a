"""The door's part in an experiment: sends requests or copies to arm B, follows them, records what came of them.

A copy has a ledger of its own: it counts in no limit of the service, nobody waits for it, and it is dropped rather
than held where there is no room. So arm B can neither slow a client's answer at the door nor change it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from pydantic import Field

from flowinfer.errors import RequestError
from flowinfer.experiment.outcome import End, Line, Memory, Outcome, Pair, Run
from flowinfer.experiment.policy import Judge, name_of, place, session_of
from flowinfer.message import ArmsClosed, Breach, Call, Finish, Piece
from flowinfer.observe import metrics
from flowinfer.observe.fleet import Fleet
from flowinfer.serve.arm_record import ArmRecord
from flowinfer.serve.ledger import Entry, Ledger
from flowinfer.spec.limits import parse_limits
from flowinfer.stage import Context, StageConfig

log = logging.getLogger(__name__)
AGAIN_S = 10.0  # between two calls for the supervisor
COPY = "~b"  # behind the id of a request that is copied
RESIDENT = "flowinfer:worker_resident_bytes"
UNAVAILABLE = 503


class ExperimentConfig(StageConfig):
    """What the file says of its experiment. digest: of both arms.  workers: those that only arm B has."""

    name: str
    mode: Literal["split", "mirror"]
    share: float = Field(ge=0, le=1)
    digest: str = ""
    service: str = "service"
    stop_if: dict[str, str] = Field(default={})
    min_requests: int = 50
    max_open: int = 4
    texts: int = 20
    workers: tuple[str, ...] = ()
    workers_a: tuple[str, ...] = ()
    changes: str = ""


@dataclass(slots=True)
class Followed:
    """A request or copy whose outcome is recorded. Texts are kept for pairs only."""

    outcome: Outcome
    began: float
    other: Followed | None = None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: bool = False


class Arms:
    """One run of an experiment. `open` when all workers know arm B, `close` before it goes."""

    def __init__(self, config: ExperimentConfig, ctx: Context, fleet: Fleet) -> None:
        self.config, self.ctx, self.fleet = config, ctx, fleet
        self.is_open = False
        self.stopped = False  # for good: arm B broke a limit
        self.copies = Ledger()
        self._followed: dict[str, Followed] = {}
        self._judge = Judge(parse_limits(config.stop_if), config.min_requests)
        self._down: set[str] = set()  # workers of arm B
        self._closing = self._ended = False
        self._dropped: Counter[str] = Counter()
        self._num_texts = 0
        self._log = ArmRecord(run_of(config), ctx, self._memory)

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Sends to arm B from now on."""
        self._closing = False
        if not self.is_open and not self.stopped:
            self.is_open = True
            self._log.begin()

    def reshare(self, config: ExperimentConfig) -> None:
        """Another share or other limits of the same arms."""
        if (config.stop_if, config.min_requests) != (self.config.stop_if, self.config.min_requests):
            self._judge = Judge(parse_limits(config.stop_if), config.min_requests)
        self.config = config

    def close(self) -> None:
        """Sends nothing more to arm B; copies are dropped, and ArmsClosed says when the last request has ended."""
        self.is_open, self._closing = False, True
        self._tell_closed()

    def end(self, reason: str) -> None:
        """The run is over: writes what is left."""
        self.is_open, self._ended = False, True
        if self._log.has_begun and not self.stopped:
            self._log.add(End(at=time.time(), reason=reason, dropped=dict(self._dropped)))
        self._log.write(at_once=True)

    def open_in_b(self) -> list[str]:
        """Requests of clients in arm B."""
        return [id for id, f in self._followed.items() if f.outcome.arm == "b" and id not in self.copies]

    def _tell_closed(self) -> None:
        if self._closing and not self.open_in_b() and not len(self.copies):
            self._closing = False
            self.ctx.send(ArmsClosed(), to="supervisor")

    # -- who goes where ------------------------------------------------------------------------------------------------

    def admit(self, calls: Sequence[Call], now: float, deadline: float) -> list[Call]:
        """Sets the arm of requests that come in; returns the copies to send beside them."""
        if not self.is_open:
            return []
        session = session_of(calls[0])
        chosen = place(session, self.config.name) < self.config.share
        if self.config.mode == "mirror":
            return self._mirror(calls, session, now, deadline) if chosen else []
        arm = "b" if chosen and not self._down else "a"
        if chosen and self._down:
            self._note_unavailable(session)
        for call in calls:
            call.arm = "b" if arm == "b" else ""
            self._follow(call.id, arm, session, now)
        return []

    def _note_unavailable(self, session: str) -> None:
        """Arm B couldn't take a request, which arm A answers."""
        message = f"worker {min(self._down)} of arm B is down"
        lost = Outcome(arm="b", session=name_of(session), at=time.time(), error=message, status=UNAVAILABLE)
        self._record(lost)

    def _mirror(self, calls: Sequence[Call], session: str, now: float, deadline: float) -> list[Call]:
        if reason := self._no_room(len(calls)):
            self._drop(reason, len(calls))
            return []
        copies = []
        for call in calls:
            # A cache of its own: what arm A has just computed of this prompt would flatter arm B.
            copy = msgspec.structs.replace(call, id=call.id + COPY, arm="b", cache_salt=call.cache_salt + COPY)
            mine, theirs = self._follow(call.id, "a", session, now), self._follow(copy.id, "b", session, now)
            mine.other, theirs.other = theirs, mine
            self.copies.open(Entry(copy.id, lambda item: None, now, deadline, (copy.id,)))
            copies.append(copy)
        return copies

    def _no_room(self, wanted: int) -> str:
        if self._down:
            return "worker_down"
        if len(self.copies) + wanted > self.config.max_open:
            return "max_open"
        return "pipeline_full" if self.ctx.full("call") else ""

    def _drop(self, reason: str, count: int = 1) -> None:
        self._dropped[reason] += count
        metrics.counter("mirror_dropped_total").labels(experiment=self.config.name, reason=reason).inc(count)

    def _follow(self, id: str, arm: str, session: str, now: float) -> Followed:
        followed = Followed(Outcome(arm=arm, session=name_of(session), at=time.time()), now)
        self._followed[id] = followed
        return followed

    # -- what comes back -----------------------------------------------------------------------------------------------

    def take(self, piece: Piece, now: float) -> bool:
        """Notes a piece; True when it belongs to a copy and so to nobody else."""
        followed = self._followed.get(piece.id)
        if followed is not None:
            self._note(followed, piece, now)
        if piece.id not in self.copies:
            return False
        if piece.finish is not None:
            self.copies.close(piece.id)
        return True

    def _note(self, followed: Followed, piece: Piece, now: float) -> None:
        outcome, since = followed.outcome, now - followed.began
        if piece.tokens or piece.text:
            if outcome.first is None:
                outcome.first = since
            outcome.last = since
        if followed.other is not None:
            followed.text.append(piece.text)
            followed.tokens += piece.tokens
        if piece.finish is not None:
            _count(outcome, piece.finish)
            self._end(piece.id, followed, since)

    def fail(self, id: str, error: RequestError, now: float) -> bool:
        """Notes a failure; True when it was that of a copy."""
        followed = self._followed.get(id)
        if followed is not None:
            followed.outcome.error, followed.outcome.status = error.message, error.status
            self._end(id, followed, now - followed.began)
        return self.copies.close(id) is not None

    def leave(self, ids: Iterable[str]) -> list[str]:
        """Clients went away, or their requests failed: forgets them, with their copies; returns the copies."""
        gone = []
        for id in ids:
            self._followed.pop(id, None)
            if self.copies.close(id + COPY) is not None:
                self._followed.pop(id + COPY, None)
                gone.append(id + COPY)
        self._tell_closed()
        return gone

    def drop_copies(self, ids: Iterable[str], reason: str) -> list[str]:
        """Gives copies up; returns those that were open."""
        gone = [id for id in ids if self.copies.close(id) is not None]
        for id in gone:
            self._followed.pop(id, None)
            self._drop(reason)
        self._tell_closed()
        return gone

    def worker_up(self, worker: str) -> None:
        self._down.discard(worker)

    def worker_down(self, worker: str) -> None:
        if worker in self.config.workers:
            self._down.add(worker)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _end(self, id: str, followed: Followed, since: float) -> None:
        del self._followed[id]
        followed.outcome.ended, followed.done = since, True
        other = followed.other
        if other is None:
            self._record(followed.outcome)
        elif other.done:
            a, b = (followed, other) if followed.outcome.arm == "a" else (other, followed)
            self._record(a.outcome, b.outcome, line=self._pair(a, b))
        self._tell_closed()

    def _pair(self, a: Followed, b: Followed) -> Pair:
        pair, texts = Pair(a=a.outcome, b=b.outcome), ("".join(a.text), "".join(b.text))
        if a.outcome.error or b.outcome.error or (texts[0] == texts[1] and a.tokens == b.tokens):
            return pair
        by_token = bool(a.tokens and b.tokens)
        pair.at = _common(a.tokens, b.tokens) if by_token else _common(*texts)
        pair.unit, pair.shared = "token" if by_token else "character", _common(*texts)
        if self._num_texts < self.config.texts:
            self._num_texts += 1
            pair.text_a, pair.text_b = texts
        return pair

    def _record(self, *outcomes: Outcome, line: Line | None = None) -> None:
        self._log.add(line or outcomes[0])
        for outcome in outcomes:
            self._log.measure(outcome)
            reason = self._judge.take(outcome)
            if reason and not self.stopped:
                self._break(reason)

    def _break(self, reason: str) -> None:
        self.stopped, self.is_open = True, False
        log.warning("experiment %s stops itself: %s; all requests go to arm A", self.config.name, reason)
        self._log.add(End(at=time.time(), reason=reason, dropped=dict(self._dropped)))
        self._tell_breach(reason)

    def _tell_breach(self, reason: str) -> None:
        """Until this arm is taken down: the supervisor may be just being replaced."""
        if not self._ended:
            self.ctx.send(Breach(experiment=self.config.name, reason=reason), to="supervisor")
            self.ctx.call_at(self.ctx.clock.now() + AGAIN_S, lambda: self._tell_breach(reason))

    def _memory(self) -> list[Line]:
        """What the workers of each arm hold now."""
        held = {
            worker: sum(value for name, _, value in samples if name == RESIDENT)
            for worker, samples in self.fleet.samples().items()
        }
        sums = [
            sum(size for worker, size in held.items() if worker.rpartition(".")[0] not in others)
            for others in (self.config.workers, self.config.workers_a)
        ]
        return [Memory(int(sums[0]), int(sums[1]))] if all(sums) else []


def run_of(config: ExperimentConfig) -> Run:
    """The head of the record of a run that begins now."""
    return Run(
        service=config.service,
        name=config.name,
        mode=config.mode,
        share=config.share,
        at=time.time(),
        changes=config.changes,
        stop_if=config.stop_if,
    )


def _count(outcome: Outcome, finish: Finish) -> None:
    outcome.prompt_tokens, outcome.completion_tokens = finish.prompt_tokens, finish.completion_tokens
    outcome.cached_tokens = finish.cached_tokens
    outcome.drafted_tokens, outcome.accepted_tokens = finish.drafted_tokens, finish.accepted_tokens


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
