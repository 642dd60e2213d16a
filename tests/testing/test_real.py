"""The same tests over true processes: real workers, sockets and kill -9."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.errors import FlowInferError
from flowinfer.testing import Outcome, run_real
from flowinfer.testing.run import WHOLE


def run(folder: Path, text: str) -> dict[str, Outcome]:
    file = folder / "plain_test.yaml"
    file.write_text(f"pipeline: plain.yaml\nallow_local: true\n{text}")
    return {outcome.name: outcome for outcome in run_real(file)}


def test_faults_strike_true_processes_and_wrong_expectations_turn_red(folder: Path) -> None:
    """A damaged frame, a death with the next message, and three expectations that don't hold."""
    done = run(
        folder,
        """
set: {serve.request_timeout: 4s}
cases:
  - {name: damaged, prompt: abc, expect: {error: 504}}
  - {name: held, prompt: abcdefghij, expect: {error: 503}}
  - {name: neither, prompt: "", with: {max_tokens: 0}, expect: {text: ed, first_token: 1s}}
faults: [{corrupt: split -> reverse}, {kill: join, edge: reverse -> join, message: 1}]
expect:
  ended: 0
  restarts: {back: 1, middle: 1}
  metrics: {malformed_frames_total: 1}
  edges:
    reverse -> join: {messages: 1, order: [held]}
    split -> reverse: {order: [damaged, held], where: num_tokens > 3}
""",
    )
    assert done["damaged"].problems == done["held"].problems == ()
    assert done["neither"].problems[0].startswith("status 400, expected 200")
    assert [problem.split(" messages, as")[0] for problem in done[WHOLE].problems] == [
        "split -> reverse: 'num_tokens > 3' doesn't hold for 1 of 2",
        "middle was started again 0 times, expected 1",
    ]


@pytest.mark.slow
def test_a_cut_runs_in_its_workers(folder: Path) -> None:
    text = """
cut: {from: reverse}
cases:
  - {name: a, message: {tokens: [97, 98]}, expect: {text: "ba[stop]"}}
  - {name: b, message: {tokens: [97]}, expect: {text: "ba[stop]"}}
faults: [{delay: reverse -> join, by: 1s, message: 2}]
expect: {edges: {reverse->join: {messages: 2, order: [a, b]}}}
"""
    done = run(folder, text)
    assert done["a"].problems == done[WHOLE].problems == ()
    assert done["b"].problems == ("text is 'a[stop]', expected 'ba[stop]'",)


def test_a_service_that_does_not_start_is_told_with_its_words(folder: Path) -> None:
    stages = folder / "stages.py"
    stages.write_text(stages.read_text().replace("self.left: dict[str, list[str]] = {}", "raise OSError('no model')"))
    with pytest.raises(FlowInferError, match="no model"):
        run(folder, "cases: [{name: a, prompt: abc, expect: {text: cba}}]\n")
