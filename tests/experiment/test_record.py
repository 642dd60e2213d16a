"""Records on disk: read back whole, though a crash tore the last line, and no more of them than are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowinfer.errors import FlowInferError
from flowinfer.experiment.outcome import End, Memory, Outcome, Pair, Run
from flowinfer.experiment.record import KEPT, append, path_of, read, records


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def run_of(at: float = 1.5, service: str = "prod") -> Run:
    return Run(service=service, name="x", mode="split", share=0.1, at=at, stop_if={"errors": "> 1%"})


def test_a_record_is_read_as_it_was_written_up_to_where_it_was_torn() -> None:
    a = Outcome(arm="a", session="s", at=2.0, first=0.1, last=0.4, ended=0.5, completion_tokens=4)
    b = Outcome(arm="b", session="s", at=2.0, error="broke", status=500)
    path = path_of(run_of())
    append(path, [run_of(), a, b])
    append(path, [Pair(a=a, b=b, at=3, text_a="x"), Memory(1, 2), End(at=9.0, reason="ended")])
    whole = read(path)
    assert (whole.run, whole.outcomes, len(whole.pairs), whole.memory) == (run_of(), [a, b], 1, [Memory(1, 2)])
    assert whole.end is not None and whole.end.reason == "ended"
    assert path.stat().st_mode & 0o077 == 0  # texts of users are nobody else's
    data = path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:cut])
        found = read(path)
        assert found.run == run_of() and found.outcomes == [a, b][: len(found.outcomes)]


def test_the_oldest_records_of_a_service_go() -> None:
    append(path_of(run_of(service="other")), [run_of(service="other")])
    for number in range(KEPT + 3):
        path = path_of(run_of(number + 1.0))
        append(path, [run_of(number + 1.0)])
        os.utime(path, (number, number))
    assert [read(path).run.at for path in records("prod")] == [number + 1.0 for number in range(3, KEPT + 3)]
    assert len(records("other")) == 1


@pytest.mark.parametrize("text", ["", "{}\n", "nothing\n"])
def test_another_file_is_told_to_be_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(FlowInferError, match="is no record"):
        read(tmp_path / "x")
