"""How a change ends: drain modes as text, what counts as a breach, and counters that must agree. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import loaded

from flowinfer.codec import Header
from flowinfer.errors import FlowInferError
from flowinfer.message import Event, Moved, Prompt, Replay, Sampling, Stats
from flowinfer.runtime.events import Counted, Heartbeat
from flowinfer.runtime.moves import Moves
from flowinfer.runtime.rewire.balance import imbalances, summary
from flowinfer.runtime.rewire.vitals import Limits, Reading, Vitals, breach, read
from flowinfer.runtime.supervisor import Supervisor
from flowinfer.spec.drain import MODES, parse_drain, total_s


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("", "finish:30s handoff:10s replay:10s abort"),
        ("5", "finish:5s handoff:10s replay:10s abort"),
        ("500ms", "finish:500ms handoff:10s replay:10s abort"),
        ("handoff:5s,replay:2min,abort", "handoff:5s replay:2min abort"),
        ("handoff", "handoff:10s abort"),
        ("abort", "abort"),
        ("finish,abort", "finish:30s abort"),
        ("finish:1, handoff:2", "finish:1s handoff:2s abort"),
    ],
)
def test_drain_modes_are_read(text: str, phases: str) -> None:
    assert " ".join(map(str, parse_drain(text))) == phases


@pytest.mark.parametrize(
    "text", ["later", "replay,handoff", "handoff,handoff", "handoff:soon", "abort:3s", "finish:-1s"]
)
def test_what_is_no_drain_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(FlowInferError) as caught:
        parse_drain(text)
    assert caught.value.help


@given(st.lists(st.sampled_from(MODES[:3]), unique=True), st.integers(1, 99))
def test_every_drain_ends_in_abort_within_its_time(modes: list[str], seconds: int) -> None:
    text = ",".join(f"{mode}:{seconds}s" for mode in sorted(modes, key=MODES.index)) or "abort"  # type: ignore[arg-type]
    phases = parse_drain(text)
    assert phases[-1].mode == "abort"
    assert total_s(phases) == seconds * len(modes)


def reading(at: float, finished: int, failed: int = 0, gaps: dict[float, int] | None = None) -> Reading:
    """Counters of a door: gaps maps an upper bound in seconds to how many tokens took that long at most."""
    samples = [("flowinfer:requests_finished_total", {"reason": "stop"}, float(finished))]
    samples.append(("flowinfer:requests_failed_total", {"code": "worker_died"}, float(failed)))
    samples.append(("flowinfer:requests_failed_total", {"code": "rewired"}, 1_000.0))  # the change's own
    total = 0
    for bound, count in sorted((gaps or {}).items()):
        total += count
        samples.append(("flowinfer:inter_token_latency_seconds_bucket", {"le": str(bound)}, float(total)))
    return read(samples, at)


BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, float("inf"))


def window(finished: int, failed: int = 0, at: float = 0.05, tokens: int = 1_000) -> Reading:
    return reading(60, finished, failed, dict.fromkeys(BUCKETS, 0) | {at: tokens})


@pytest.mark.parametrize(
    ("during", "told"),
    [
        (window(100), ""),
        (window(100, at=0.1), ""),  # twice as slow: other load, another moment
        (window(100, at=0.5), "tokens take"),
        (window(100, at=0.5, tokens=10), ""),  # too few to tell
        (window(100, at=0.5)._replace(at=2.0), ""),  # too short to tell
        (window(100, at=1.0)._replace(at=5.0), "tokens take"),
        (window(100, failed=2), ""),
        (window(100, failed=3), ""),  # 3 %, within 5
        (window(40, failed=10), "10 of 50 requests failed, 20% against 0% before"),
        (window(0), ""),
    ],
)
def test_a_breach_is_told_and_noise_is_none(during: Reading, told: str) -> None:
    found = breach(window(200), during, Limits())
    assert found.startswith(told) if told else found == ""


def test_limits_are_settable() -> None:
    assert breach(window(200), window(100, failed=3), Limits(errors=0.01))
    assert breach(window(200), window(100, at=0.5), Limits(latency=1.5))
    assert not breach(window(200), window(100, at=0.5), Limits(latency=100))


def test_a_door_that_started_anew_is_no_breach() -> None:
    vitals = Vitals()
    for at in range(5):
        vitals.add(reading(at, 100 + at))
    vitals.add(reading(6, 1))
    assert vitals.before() is None
    vitals.add(reading(7, 5))
    before = vitals.before()
    assert before is not None and before.finished == 4


def counted(**found: object) -> Counted:
    return Counted(number=1, **found)  # type: ignore[arg-type]


def test_counters_that_agree_are_summed_up() -> None:
    told = {
        "front.0": counted(
            sent=(("a -> b", "back.0", 7), ("a -> b", "back.1", 3)), received=(("b -> a", "back.0", 5, 0),)
        ),
        "back.0": counted(sent=(("b -> a", "front.0", 5),), received=(("a -> b", "front.0", 7, 0),)),
    }
    assert imbalances(told, ["back.0"]) == []
    assert summary(told, ["back.0"]).startswith("12 messages")


def test_an_imbalance_is_told_with_its_numbers() -> None:
    told = {
        "front.0": counted(sent=(("a -> b", "back.0", 7),), received=(("b -> a", "back.0", 4, 0),), layered=9, left=2),
        "back.0": counted(sent=(("b -> a", "front.0", 5),), received=(("a -> b", "front.0", 7, 1),), open=1),
    }
    assert imbalances(told, ["back.0"]) == [
        "edge b -> a: back.0 sent 5, front.0 received 4",
        "edge a -> b: back.0 still has 1 of front.0 not ended",
        "back.0 still has 1 open requests",
        "the old stages of front.0 still have 2 of 9 requests",
    ]


def test_what_was_moved_from_who_leaves_must_have_arrived() -> None:
    moves = Moves()
    moves.note_sent(Replay(prompt=Prompt(id="r", tokens=np.zeros(1, np.int32), sampling=Sampling())), "front.0")
    leaver, taker = counted(sent=tuple(moves.sent())), Moves()
    before = {"back.0": leaver, "front.0": counted(received=tuple(taker.received()))}
    assert imbalances(before, ["back.0"]) == ["edge moves: back.0 sent 1, front.0 received 0"]
    taker.note_received(Moved(ids=["r"]), "back.0")
    after = {"back.0": leaver, "front.0": counted(received=tuple(taker.received()))}
    assert imbalances(after, ["back.0"]) == []


class Sent:
    """Stands in for the supervisor's channel."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Event]] = []

    def send_event(self, peer: str, event: Event) -> bool:
        self.events.append((peer, event))
        return True


@pytest.mark.parametrize("late", [{"generation": 1}, {"sender": "middle.7"}, {"down": True}])
def test_what_an_instance_that_is_gone_says_is_refused_and_counted(tmp_path: Path, late: dict[str, Any]) -> None:
    supervisor: Any = Supervisor(loaded(tmp_path))
    supervisor.channel = sent = Sent()
    child = supervisor.children["middle.0"]
    child.generation, child.state = 2, "down" if late.pop("down", False) else "ready"
    header = Header("Heartbeat", **{"sender": "middle.0", "generation": 2} | late)
    supervisor._take(header, Heartbeat(open_requests=3))
    assert supervisor.num_late == 1 and child.beat_at == 0.0
    ((peer, stats),) = sent.events
    assert peer == "front.0" and isinstance(stats, Stats)
    assert stats.samples == [("flowinfer:refused_late_frames_total", {"reason": "generation"}, 1.0)]


def test_what_a_live_instance_says_is_taken(tmp_path: Path) -> None:
    supervisor: Any = Supervisor(loaded(tmp_path))
    supervisor.channel = Sent()
    child = supervisor.children["middle.0"]
    child.generation, child.state = 2, "ready"
    supervisor._take(Header("Heartbeat", "middle.0", 2), Heartbeat())
    assert supervisor.num_late == 0 and child.beat_at > 0
