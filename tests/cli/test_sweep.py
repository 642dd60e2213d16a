"""`flowinfer sweep`: the grid, resuming, the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.cli import main
from flowinfer.compare.sweep import Cell, cells, front, parse_axis, read_cells
from flowinfer.errors import FlowInferError


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["sweep", *map(str, arguments), "--allow-local"])


def test_a_sweep_resumes_behind_what_it_finished(echo_file: Path, tmp_path: Path) -> None:
    prompts, out, page = tmp_path / "p.jsonl", tmp_path / "out.jsonl", tmp_path / "out.html"
    prompts.write_text('{"prompt": "one two"}\n')
    arguments = [echo_file, "-x", "stages.echo.with.delay=0.0,0.003", "--on", prompts, "--rounds", 2, "--out", out]
    first = run(*arguments, "--html", page)
    assert first.exit_code == 0, first.output
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2
    fast, slow = read_cells(out).values()
    assert (fast.how, slow.how) == ("start", "warm")
    assert (fast.figures["memory"] or 0) > 1e6
    assert (fast.figures["latency_p50"] or 0) < (slow.figures["latency_p50"] or 0)
    out.write_bytes(lines[0] + lines[1][:40])  # killed while it wrote the second
    assert run(*arguments).exit_code == 0
    again = out.read_bytes().splitlines(keepends=True)
    assert (again[0], len(read_cells(out))) == (lines[0], 2)
    assert run(*arguments).exit_code == 0
    assert out.read_bytes() == b"".join(again)
    assert page.read_text().count("<circle") == 2


LIVE = '''

class Live(Echo):
    """Takes its delay between two steps; its name needs a new start."""

    class Config(StageConfig):
        delay: float = setting(0.0, change="live")
        name: str = setting("", change="cold")

    def reconfigure(self, config) -> None:
        pass
'''


@pytest.mark.parametrize("real", [False, True])
def test_cells_follow_each_other_with_as_few_starts_as_can_be(echo_file: Path, tmp_path: Path, real: bool) -> None:
    source = (
        (tmp_path / "echo.py").read_text().replace("import Stage, StageConfig", "import Stage, StageConfig, setting")
    )
    (tmp_path / "echo.py").write_text(source + LIVE)
    echo_file.write_text(echo_file.read_text().replace("echo.py:Echo", "echo.py:Live"))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "one two"}\n')
    axes = ["-x", "stages.echo.with.delay=0.0,0.02", "-x", "stages.echo.with.name=a,b"]
    result = run(echo_file, *axes, "--on", prompts, "--rounds", 2, "--out", out, *["--real"] * real)
    assert result.exit_code == 0, result.output
    cells = {tuple(cell.sets.values()): cell for cell in read_cells(out).values()}
    assert [cells[key].how for key in (("0.0", "a"), ("0.02", "a"))] == ["start", "live"]
    assert sorted(cells[key].how for key in (("0.0", "b"), ("0.02", "b"))) == ["live", "start"]
    for name in "ab":  # and the change has truly come about
        fast, slow = (cells[delay, name].figures["latency_p50"] or 0 for delay in ("0.0", "0.02"))
        assert slow > fast + 0.03
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("0.")]
    assert [row[:2] for row in rows] == [["0.0", "a"], ["0.0", "b"], ["0.02", "a"], ["0.02", "b"]]


def cell(cost: float | None, gain: float | None) -> Cell:
    return Cell(f"{cost} {gain}", {}, {"latency_p50": cost, "tokens_per_s": gain}, [], [])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_nothing_beats_a_cell_of_the_front_in_both(points: list[tuple[int, int]]) -> None:
    found = [cell(*point) for point in points]
    best = front(found)
    for point in points:
        beaten = any(x <= point[0] and y >= point[1] and (x, y) != point for x, y in points)
        assert beaten == (f"{point[0]} {point[1]}" not in {c.key for c in best})
    assert front([cell(None, 1.0)]) == []


def test_a_grid_has_every_combination_and_a_list_only_its_rows() -> None:
    axes = [parse_axis("a.b=1,2"), parse_axis("c={x: 1, y: 2},[3, 4]")]
    assert [tuple(cell.values()) for cell in cells(axes)] == [
        ("1", "{x: 1, y: 2}"),
        ("1", "[3, 4]"),
        ("2", "{x: 1, y: 2}"),
        ("2", "[3, 4]"),
    ]
    assert [tuple(cell.values()) for cell in cells(axes, paired=True)] == [("1", "{x: 1, y: 2}"), ("2", "[3, 4]")]


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1,,2", "a=1,1"])
def test_an_axis_that_cannot_be_read(text: str) -> None:
    with pytest.raises(FlowInferError, match="names no values"):
        parse_axis(text)


def test_a_mistake_in_the_last_cell_is_told_before_the_first_runs(echo_file: Path, tmp_path: Path) -> None:
    result = run(echo_file, "-x", "stages.echo.with.delay=0,fast", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 1 and "fast" in result.output
    assert not (tmp_path / "out.jsonl").exists()
