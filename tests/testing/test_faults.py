"""Faults in virtual time: each does what it says, each can turn a test red, and the service bears them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.cache.disk.io import Files
from flowinfer.errors import SpecError
from flowinfer.testing import Outcome
from flowinfer.testing.run import WHOLE

RunFile = Callable[[str], dict[str, Outcome]]


def problems(outcomes: dict[str, Outcome]) -> dict[str, tuple[str, ...]]:
    return {name: outcome.problems for name, outcome in outcomes.items() if outcome.problems}


def test_a_minute_of_waiting_takes_no_time_and_answers_are_exact(run: RunFile) -> None:
    began = time.perf_counter()
    done = run(
        """
cases:
  - {name: a, prompt: abc, at: 0s, expect: {text: cba, latency: 300ms, first_token: 100ms}}
  - {name: b, prompt: de, at: 50ms, expect: {text: ed, finish_reason: stop}}
  - {name: late, prompt: f, at: 1min, expect: {text: f}}
expect:
  ended: 3
  order: [b, a, late]
  edges: {split -> reverse: {messages: 3, order: [a, b, late]}, join -> api: {messages: 6}}
  latency_p50: 200ms
  latency_p95: 300ms
"""
    )
    assert problems(done) == {}
    assert time.perf_counter() - began < 5.0


def test_what_is_expected_wrongly_turns_red_with_the_difference(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: a, prompt: abc, at: 0s, expect: {latency: 299ms}}
  - {name: b, prompt: de, at: 0s, expect: {first_token: 99ms, text: de}}
expect:
  ended: 1
  failed: 1
  order: [a, b]
  edges: {split->reverse: {messages: 3, order: [b, a], where: num_tokens > 2}}
  restarts: {join: 1}
  metrics: {malformed_frames_total: {min: 1}, refused_late_frames_total: 2}
  latency_p95: 250ms
"""
    )
    assert done["a"].problems == ("whole after 300 ms, expected within 299 ms",)
    assert done["b"].problems == ("text is 'ed', expected 'de'", "first token after 100 ms, expected within 99 ms")
    assert [problem.split("\n")[0] for problem in done[WHOLE].problems] == [
        "2 cases ended, expected 1",
        "0 cases failed, expected 1",
        "the order in which cases ended is ['b', 'a'], expected ['a', 'b']",
        "split -> reverse: 2 messages, expected 3",
        "split -> reverse: the order is ['a', 'b'], expected ['b', 'a']",
        done[WHOLE].problems[5],
        "join was started again 0 times, expected 1",
        "malformed_frames_total grew by 0, expected at least 1",
        "refused_late_frames_total grew by 0, expected 2",
        "latency p95 is 300 ms, expected within 250 ms",
    ]
    assert (
        done[WHOLE].problems[5].startswith("split -> reverse: 'num_tokens > 2' doesn't hold for 1 of 2 messages, as {")
    )


def test_kill_fails_what_the_worker_held_and_a_new_one_answers_the_rest(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: held, prompt: abc, at: 0s, expect: {error: 503}}
  - {name: on its way, prompt: de, at: 100ms, expect: {error: 503}}
  - {name: while it is down, prompt: x, at: 110ms, expect: {error: 503}}
  - {name: after, prompt: xyz, at: 2s, expect: {text: zyx}}
faults: [{kill: join, edge: reverse -> join, message: 2}]
expect: {failed: 3, restarts: {back: 1, middle: 0}}
"""
    )
    assert problems(done) == {}


def test_kill_at_a_time_and_twice(run: RunFile) -> None:
    text = """
cases:
  - {name: a, prompt: abcdefgh, at: 0s, expect: {error: 503}}
  - {name: b, prompt: xyz, at: 5s, expect: {text: zyx}}
faults: [{kill: back.0, at: 250ms, count: %d}]
expect: {restarts: {back.0: %d}}
"""
    assert problems(run(text % (1, 1))) == {}
    assert problems(run(text % (2, 2))) == {}
    assert "back.0 was started again 1 times, expected 2" in run(text % (1, 2))[WHOLE].problems


def test_who_asks_while_the_front_dies_loses_the_connection(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: a, prompt: abcdef, at: 0s, expect: {error: lost}}
  - {name: b, prompt: de, at: 210ms, expect: {text: ed}}
faults: [{kill: front, at: 200ms}]
expect: {restarts: {front: 1}}
"""
    )
    assert problems(done) == {}


def test_delay_is_added_to_those_messages_and_keeps_their_order(run: RunFile) -> None:
    text = """
cases:
  - {name: a, prompt: a, at: 0s, expect: {latency: %s}}
  - {name: b, prompt: b, at: 10ms, expect: {text: b}}
  - {name: c, prompt: c, at: 5s, expect: {latency: 100ms}}
faults: [{delay: split->reverse, by: 1s, count: 1}]
expect: {order: [a, b, c], edges: {reverse -> join: {order: [a, b, c]}}}
"""
    assert problems(run(text % "1100ms")) == {}
    assert run(text % "1099ms")["a"].problems == ("whole after 1100 ms, expected within 1099 ms",)


def test_delay_inside_a_worker_and_for_a_while(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: a, prompt: a, at: 0s, expect: {latency: 100ms}}
  - {name: b, prompt: b, at: 1s, expect: {latency: 600ms}}
  - {name: c, prompt: c, at: 3s, expect: {latency: 100ms}}
faults: [{delay: api -> split, by: 500ms, at: 900ms, for: 1s}]
"""
    )
    assert problems(done) == {}


def test_a_corrupt_frame_is_counted_and_its_request_times_out(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: a, prompt: abc, expect: {text: cba}}
  - {name: b, prompt: de, expect: {error: 504, latency: 30s}}
  - {name: c, prompt: de, expect: {text: ed}}
faults: [{corrupt: reverse -> join, message: 2}]
expect: {metrics: {malformed_frames_total: 1}}
"""
    )
    assert problems(done) == {}


def test_without_credit_requests_wait_until_their_time_is_over(run: RunFile) -> None:
    done = run(
        """
cases:
  - {name: a, prompt: abc, expect: {text: cba}}
  - {name: b, prompt: de, at: 2s, expect: {error: 504}}
faults: [{drop_credit: reverse -> join, at: 1s}]
"""
    )
    assert problems(done) == {}


def test_a_request_that_nobody_will_ever_end_is_told_as_stuck(run: RunFile, folder: Path) -> None:
    """A stage that forgets what it takes, in a cut, where there is no gateway with a deadline."""
    stages = folder / "stages.py"
    stages.write_text(stages.read_text().replace("            yield prompt\n", "            pass\n        return []\n"))
    done = run(
        "cut: {from: reverse, to: reverse}\ncases: [{name: a, message: {num_tokens: 3}, expect: {where: id == 'a'}}]\n"
    )
    assert "status stuck" in done["a"].problems[0] and "middle.0 still holds request a" in done["a"].problems[0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_fails_each_request_has_one_end_and_nothing_is_held(run: RunFile, data: st.DataObject) -> None:
    """`the run as a whole` has no problem exactly when no worker holds anything and all credit is back."""
    times, workers = st.integers(0, 2_000), ["front", "middle.0", "middle.1", "back"]
    kills = data.draw(st.lists(st.tuples(st.sampled_from(workers), times), max_size=3))
    edges = st.sampled_from(["split -> reverse", "reverse -> join", "join -> api"])
    delays = data.draw(st.lists(st.tuples(edges, st.integers(1, 800), times), max_size=2))
    faults = [f"{{kill: {worker}, at: {at}ms}}" for worker, at in kills]
    faults += [f"{{delay: {edge}, by: {by}ms, at: {at}ms}}" for edge, by, at in delays]
    starts = data.draw(st.lists(times, min_size=1, max_size=6))
    cases = [f"  - {{name: r{i}, prompt: {'x' * (1 + i)}, at: {at}ms}}" for i, at in enumerate(starts)]
    lines = ["set: {workers.middle.replicas: 2}", "cases:", *cases, f"faults: [{', '.join(faults)}]"]
    done = run("\n".join([*lines, "expect: {metrics: {malformed_frames_total: 0}}", ""]))
    assert done[WHOLE].problems == ()
    for i in range(len(starts)):
        text = done[f"r{i}"].text
        assert text == "x" * (1 + i) or "died" in text or "down" in text or "broke" in text, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("faults: [{kill: a, delay: b}]", "a fault is one of"),
        ("faults: [{delay: split -> reverse}]", "delay and by belong together"),
        ("faults: [{kill: join, at: 1s, message: 2, edge: reverse -> join}]", "not both"),
        ("faults: [{kill: join, message: 2}]", "message and edge belong together"),
        ("faults: [{full_disk: join, message: 2}]", "begins at a time"),
        ("faults: [{corrupt: reverse -> jion, message: 2}]", "Did you mean `reverse -> join`?"),
        ("faults: [{drop_credit: api -> split}]", "has no credit: both ends are in the worker 'front'"),
        ("faults: [{kill: jion}]", "Did you mean `join`?"),
        ("faults: [{kill: join, edge: api -> split, message: 1}]", "neither begins nor ends in the worker 'back'"),
        ("faults: [{full_disk: join}]", "has no disk tier"),
        ("fault: []", "Did you mean `faults`?"),
        ("expect: {order: [b]}", "No case is called 'b'"),
        ("expect: {metrics: {malformed_frame_total: 1}}", "Did you mean `malformed_frames_total`?"),
        ("expect: {edges: {split -> revers: {messages: 1}}}", "Did you mean `split -> reverse`?"),
        ("expect: {edges: {split -> reverse: {where: num_token > 1}}}", "Did you mean `num_tokens`?"),
        ("expect: {restarts: {jion: 1}}", "Did you mean `join`?"),
        ("mock: [{from: reverse}]", "The mock has no recording"),
        ("recording: x.flow", "for mocks and for replay"),
        ("mock: [{from: reverse, recording: no.flow}]", "There is no recording no.flow"),
        ("mock: [{from: revers, recording: no.flow}]", "Did you mean `reverse`?"),
        ("cut: {from: jion}", "There is no stage 'jion'"),
        ("cut: {from: reverse}", "carries Prompt"),
    ],
)
def test_mistakes_are_told_with_their_place(run: RunFile, text: str, message: str) -> None:

    with pytest.raises(SpecError) as caught:
        run(f"cases: [{{name: a, prompt: a, expect: {{text: a}}}}]\n{text}\n")
    told = [problem for problem in caught.value.problems if message in str(problem)]
    assert told, str(caught.value)
    assert told[0].mark is not None and told[0].mark.line >= 3


DISK_STAGE = '''
import errno
from collections.abc import Iterable
from pathlib import Path
from flowinfer.cache.disk.io import Files
from flowinfer.message import Call, Finish, Piece, Text
from flowinfer.stage import Stage, StageConfig

class Keep(Stage):
    """Writes a file of its disk tier for each call, and says how that went."""

    class Config(StageConfig):
        tiers: dict[str, dict[str, str]]

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            try:
                Files().create(Path(self.config.tiers["disk"]["path"]) / call.id, 4096)
                text = "kept"
            except OSError as error:
                text = errno.errorcode[error.errno]
            yield Text(step=0, pieces=[Piece(id=call.id, text=text, finish=Finish(reason="stop"))])
'''


def test_a_full_disk_says_so_to_who_writes_and_has_room_again(run: RunFile, folder: Path) -> None:
    (folder / "stages.py").write_text(DISK_STAGE)
    (folder / "plain.yaml").write_text(
        f"flowinfer: 1\nstages:\n  keep: {{use: './stages.py:Keep', with: {{tiers: {{disk: {{path: '{folder}'}}}}}}}}\n"
        "edges:\n  api -> keep:\n  keep -> api:\n"
    )
    done = run(
        """
cases:
  - {name: before, prompt: a, at: 0s, expect: {text: kept}}
  - {name: meanwhile, prompt: a, at: 1500ms, expect: {text: ENOSPC}}
  - {name: also, prompt: a, at: 1600ms, expect: {text: kept}}
  - {name: after, prompt: a, at: 3s, expect: {text: kept}}
faults: [{full_disk: keep, at: 1s, for: 1s}]
"""
    )
    assert problems(done) == {"also": ("text is 'ENOSPC', expected 'kept'",)}
    assert "full" not in Files.create.__name__, "the process has its disk back"


def test_workers_of_one_process_whose_disks_were_full_leave_them_as_they_were(run: RunFile, folder: Path) -> None:
    (folder / "stages.py").write_text(DISK_STAGE)
    (folder / "plain.yaml").write_text(
        "flowinfer: 1\nworkers: {back: {}}\n"
        f"stages:\n  keep: {{use: './stages.py:Keep', with: {{tiers: {{disk: {{path: '{folder}'}}}}}},"
        " place: {worker: back}}\nedges:\n  api -> keep:\n  keep -> api:\n"
    )
    before = Files.create, Files.write
    done = run("""
cases: [{name: a, prompt: a, at: 10ms, expect: {text: ENOSPC}}]
faults: [{full_disk: keep, at: 0s}]
""")
    assert problems(done) == {} and (Files.create, Files.write) == before
