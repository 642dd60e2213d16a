"""`flowinfer sweep`: the grid, resuming, the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowinfer.cli import main
from flowinfer.compare.sweep import cells, parse_axis, read_cells
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
    assert (fast.figures["latency_p50"] or 0) < (slow.figures["latency_p50"] or 0)
    out.write_bytes(lines[0] + lines[1][:40])  # killed while it wrote the second
    assert run(*arguments).exit_code == 0
    again = out.read_bytes().splitlines(keepends=True)
    assert (again[0], len(read_cells(out))) == (lines[0], 2)
    assert run(*arguments).exit_code == 0
    assert out.read_bytes() == b"".join(again)
    assert page.read_text().count("<circle") == 2


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
