"""The journal as people read it: a block for each change, with what became of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.history import grouped
from flowinfer.runtime.rewire.journal import Journal
from flowinfer.runtime.rewire.protocol import Step

STEPS = [
    (0, "start", "process 10"),
    (1, "begin", "swap detokenize"),
    (1, "switch", "new requests go by epoch 2"),
    (1, "takeover", "process 11: the controller died in the step 'switch'"),
    (1, "resume", "from 'switch': 2 of 3 workers had switched"),
    (1, "done", "epoch 2"),
    (1, "takeover", "process 12: the controller died between changes"),
    (2, "begin", "scale prefill 2"),
    (2, "prepare", "prefill.1"),
    (2, "abandoned", "before the switch: the service runs by epoch 2 as before"),
    (3, "begin", "set serve.max_requests=7"),
    (3, "drain", "finish: what is open has 30 s to end"),
]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    journal = Journal("prod")
    for change, step, text in STEPS:
        journal.write(change, 2, step, text)
    return journal


def shown(*args: str) -> str:
    result = CliRunner().invoke(main, ["history", "--name", "prod", *args], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_each_change_is_a_block_that_says_how_it_ended(journal: Journal) -> None:
    heads = [line[21:] for line in shown().splitlines() if line[0] == "2"]
    assert heads == [
        "start      process 10",
        "change 1  swap detokenize: done after 0.0 s",
        "takeover   process 12: the controller died between changes",
        "change 2  scale prefill 2: abandoned after 0.0 s",
        "change 3  set serve.max_requests=7: not over",
    ]
    assert re.search(r"0.0 s  resume +epoch 2 +from 'switch': 2 of 3 workers had switched", shown())


def test_the_last_ones_and_json(journal: Journal) -> None:
    assert "change 3" in shown("--last", "1") and "change 2" not in shown("--last", "1")
    assert len(shown("--json").splitlines()) == len(STEPS)
    assert [len(block) for block in grouped(journal.read())] == [1, 5, 1, 3, 2]
    assert [step.step for step in journal.unfinished()] == ["begin", "drain"]


def test_a_service_that_never_changed_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "Nothing was changed yet." in shown()
    assert grouped([Step(at=0, change=1, epoch=1, step="done")]) != []
