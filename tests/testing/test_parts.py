"""Cuts and mocks: a part of a graph by itself, and stages that a recording speaks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowinfer.errors import SpecError
from flowinfer.testing import Outcome
from flowinfer.testing.run import WHOLE

RunFile = Callable[[str], dict[str, Outcome]]


def problems(outcomes: dict[str, Outcome]) -> dict[str, tuple[str, ...]]:
    return {name: outcome.problems for name, outcome in outcomes.items() if outcome.problems}


def test_a_cut_takes_requests_and_its_messages_are_looked_at(run: RunFile) -> None:
    done = run(
        """
cut: {from: split, to: reverse}
cases:
  - {name: a, prompt: abc, expect: {where: num_tokens == 3 and request == 'a'}}
  - {name: b, prompt: abcd, expect: {where: num_tokens == 3}}
expect: {edges: {reverse -> join: {messages: 2}}}
"""
    )
    assert list(problems(done)) == ["b"]
    assert done["b"].problems[0].startswith("'num_tokens == 3' doesn't hold for {'type': 'Prompt', 'id': 'b'")


def test_a_cut_takes_messages(run: RunFile) -> None:
    done = run(
        """
cut: {from: join}
cases:
  - {name: a, message: {tokens: [104, 105]}, expect: {text: "hi[stop]", latency: 200ms}}
  - {name: b, message: {num_tokens: 2, sampling: {max_tokens: 3}}, expect: {latency: 100ms}}
"""
    )
    assert problems(done) == {"b": ("whole after 200 ms, expected within 100 ms",)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{num_token: 3}", "Prompt has no field 'num_token'. Did you mean `tokens`?"),
        ("{num_tokens: 3, sampling: {temperatur: 1}}", "Prompt.sampling has no field 'temperatur'"),
        ("{num_tokens: 3, sampling: {temperature: hot}}", "Prompt.sampling.temperature: expected `float`, got `str`"),
        ("{sampling: {}}", "can't be made of these fields"),
        ("{tokens: [x]}", "can't be made of these fields"),
    ],
)
def test_a_message_that_cannot_be_is_told_at_its_place(run: RunFile, fields: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        run(f"cut: {{from: reverse}}\ncases:\n  - {{name: a, message: {fields}, expect: {{text: x}}}}\n")
    (problem,) = caught.value.problems
    assert message in str(problem)
    assert problem.mark is not None and problem.mark[1:] == (5, 24)


@pytest.mark.usefixtures("recording")
def test_a_recording_is_put_through_a_cut_and_held_against_what_it_gave(run: RunFile, folder: Path) -> None:
    text = "recording: x.flow\ncut: {from: reverse}\nreplay: true\nexpect: {ended: 3}\n"
    done = run(text)
    assert problems(done) == {} and len(done) == 4
    stages = folder / "stages.py"
    stages.write_text(stages.read_text().replace("[::-1]", "[:]"))
    changed = run(text)
    assert len(problems(changed)) == 2, "f is the same in both directions"
    assert "what came out is 'abc[stop]', expected 'cba[stop]'" in str(problems(changed))


MOCKED = """
recording: x.flow
mock: [{from: reverse, to: join%s}]
cases:
  - {name: a, prompt: abc, with: {max_tokens: 16}, at: 0s, expect: {text: cba, finish_reason: stop}}
  - {name: b, prompt: de, with: {max_tokens: 16}, at: 0s, expect: {text: ed}}
"""


@pytest.mark.usefixtures("recording")
def test_a_mock_speaks_from_the_recording_at_its_pace(run: RunFile, folder: Path) -> None:
    """The stages aren't run: they can't even be opened."""
    stages = folder / "stages.py"
    stages.write_text(stages.read_text().replace("self.left: dict[str, list[str]] = {}", "raise OSError('no model')"))
    assert problems(run(MOCKED % "" + "expect: {order: [b, a]}\n")) == {}
    fast = run(MOCKED % ", speed: max" + "expect: {latency_p95: 0}\n")
    assert problems(fast) == {}
    slow = run(MOCKED % ", speed: 0.5" + "expect: {latency_p95: 500ms}\n")
    assert list(problems(slow)) == [WHOLE]


@pytest.mark.usefixtures("recording")
def test_what_was_not_recorded_is_an_error_that_tells_the_nearest(run: RunFile) -> None:
    done = run(MOCKED % "" + "  - {name: c, prompt: abc, with: {max_tokens: 17}, expect: {text: cba}}\n")
    (problem,) = done["c"].problems
    assert (
        "The recording holds no such Prompt; the nearest differs in sampling.max_tokens (17 here, 16 there)" in problem
    )


@pytest.mark.usefixtures("recording")
def test_a_mock_can_be_killed_and_its_requests_end_once(run: RunFile) -> None:
    done = run(
        """
recording: x.flow
mock: [{from: reverse, to: join, worker: back}]
cases:
  - {name: a, prompt: abc, with: {max_tokens: 16}, at: 0s, expect: {error: 503}}
  - {name: b, prompt: de, with: {max_tokens: 16}, at: 3s, expect: {text: ed}}
faults: [{kill: reverse, at: 150ms}]
expect: {restarts: {back: 1}}
"""
    )
    assert problems(done) == {}


@pytest.mark.usefixtures("recording")
def test_an_equivalent_pipeline_runs_with_the_same_mocks_and_without_the_faults(run: RunFile, folder: Path) -> None:
    plain = (folder / "plain.yaml").read_text()
    (folder / "other.yaml").write_text(plain.replace("name: plain", "name: other"))
    text = "equivalent_to: other.yaml\nfaults: [{%s}]\n" + MOCKED % ""
    assert problems(run(text % "delay: split -> reverse, by: 3s")) == {}
    assert "a" in problems(run(text % "kill: front, at: 10ms"))


def test_answers_of_two_pipelines_are_told_apart(run: RunFile, folder: Path) -> None:
    plain = (folder / "plain.yaml").read_text()
    (folder / "loud.yaml").write_text(plain.replace('"./stages.py:Join"', '"./stages.py:Join", with: {mark: "!"}'))
    done = run("equivalent_to: loud.yaml\ncases: [{name: a, prompt: ab, at: 0s}]\n")
    assert done["a"].problems == ("the answer of loud.yaml is 'b!a!', expected 'ba'",)
