"""The report of an experiment, from its record: a comparison's figures and verdicts, over a service's own traffic.

With `split` each arm answered other sessions: the arms are resampled by themselves, each by its sessions, since
requests of one session are alike. With `mirror` both answered the same requests, which are resampled in pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from flowinfer.compare.answers import Answers, Difference
from flowinfer.compare.arms import Answer
from flowinfer.compare.asks import COMPLETION, Ask
from flowinfer.compare.comparison import Comparison, Setup, machine, side_of
from flowinfer.compare.figures import Limit, figures, unpaired
from flowinfer.compare.rounds import Group
from flowinfer.compare.verdict import headline
from flowinfer.errors import FlowInferError
from flowinfer.experiment.outcome import Outcome, Pair
from flowinfer.experiment.record import Recorded


def report_of(recorded: Recorded, limit: Limit) -> Comparison:
    """The comparison of both arms. Raises FlowInferError while one of them has answered nothing."""
    a = [o for o in recorded.outcomes if o.arm == "a"] + [pair.a for pair in recorded.pairs]
    b = [o for o in recorded.outcomes if o.arm == "b"] + [pair.b for pair in recorded.pairs]
    if not a or not b:
        arm = "B" if a else "A"
        raise FlowInferError(f"Arm {arm} of experiment {recorded.run.name} has answered no request yet.")
    setup = _setup(recorded, limit, len(a) + len(b))
    if recorded.run.mode == "mirror":
        groups = _paired(recorded)
        found, answers = figures(groups, limit, setup.seed, busy=True), _answers(recorded.pairs)
    else:
        memory = [(reading.a, reading.b) for reading in recorded.memory]
        sides = [[[_answer(o) for o in group] for group in _by_session(side)] for side in (a, b)]
        found, answers = unpaired(sides[0], sides[1], limit, memory, setup.seed), Answers(0, [], [], [])
    answers.failed_a = [o.error for o in a if o.error]
    answers.failed_b = [o.error for o in b if o.error]
    measured = [side_of(name, [_answer(o) for o in side]) for name, side in ((setup.a, a), (setup.b, b))]
    return Comparison(headline(found, answers), setup, found, answers, measured[0], measured[1])


def _setup(recorded: Recorded, limit: Limit, num_requests: int) -> Setup:
    run, end = recorded.run, recorded.end
    dropped = ", ".join(f"{count} by {reason}" for reason, count in sorted((end.dropped if end else {}).items()))
    notes = [f"ended: {end.reason}" if end else "", f"copies dropped: {dropped}" if dropped else ""]
    return Setup(
        a=f"{run.service}, arm A",
        b=f"{run.service}, arm B of {run.name}",
        changes=run.changes,
        requests="the service's own traffic",
        num_requests=num_requests,
        rounds=1,
        in_flight=0,
        limit=limit,
        real=True,
        machine=machine(),
        when=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.at)),
        kind="mirror" if run.mode == "mirror" else "split",
        share=run.share,
        note="; ".join(note for note in notes if note),
    )


def _paired(recorded: Recorded) -> list[Group]:
    """Pairs by session. Memory is read at times of its own, so its readings are dealt out over the groups."""
    found: dict[str, list[Pair]] = {}
    for pair in recorded.pairs:
        found.setdefault(pair.a.session, []).append(pair)
    groups = []
    for number, pairs in enumerate(found.values()):
        asks = [Ask(str(number), COMPLETION, {}) for _ in pairs]
        groups.append(Group(number, asks, [_answer(p.a) for p in pairs], [_answer(p.b) for p in pairs]))
    for group, reading in zip(groups, recorded.memory, strict=False):
        group.memory = (reading.a, reading.b)
    return groups


def _by_session(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.session, []).append(outcome)
    return list(found.values())


def _answer(o: Outcome) -> Answer:
    stamps = [] if o.first is None else [o.first] if o.last is None or o.last <= o.first else [o.first, o.last]
    return Answer(
        asked=0.0,
        stamps=stamps,
        prompt_tokens=o.prompt_tokens,
        completion_tokens=o.completion_tokens,
        cached_tokens=o.cached_tokens,
        drafted_tokens=o.drafted_tokens,
        accepted_tokens=o.accepted_tokens,
        ended=o.ended,
        error=o.error,
    )


def _answers(pairs: Sequence[Pair]) -> Answers:
    """What the door found when it compared each copy's answer with that of its request."""
    differing = [
        Difference(
            f"{number} of session {pair.a.session}",
            0,
            pair.at or 0,
            "token" if pair.unit == "token" else "character",
            pair.shared,
            pair.text_a,
            pair.text_b,
        )
        for number, pair in enumerate(pairs, start=1)
        if pair.at is not None
    ]
    return Answers(len(pairs), differing, [], [])
