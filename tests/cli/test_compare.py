"""`flowinfer compare` over a pipeline that echoes: both arms run, the verdict, the files, the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowinfer.cli import main
from flowinfer.compare.asks import load_asks
from flowinfer.errors import FlowInferError


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["compare", *map(str, arguments), "--allow-local"])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two three"}\n\n{"chat": "four five six"}\n')
    return file


def test_a_slower_side_is_found(echo_file: Path, prompts: Path, tmp_path: Path) -> None:
    files = ["--json", tmp_path / "out.json", "--html", tmp_path / "out.html"]
    slow = ["--set", "stages.echo.with.delay=0.01", "--rounds", 8, "--in-flight", 1]
    result = run(echo_file, *slow, "--on", prompts, *files)
    assert result.exit_code == 0, result.output
    assert re.search(r"B is \d+ % slower at p50", result.output)
    assert "all 16 answers are the same" in result.output
    report = json.loads((tmp_path / "out.json").read_text())
    (latency,) = [figure for figure in report["figures"] if figure["name"] == "latency_p50"]
    assert latency["low"] > 0
    assert "delay: 0.01" in report["setup"]["changes"]
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") == 3 and "http://" not in page.replace("http://www.w3.org", "")


def test_answers_that_differ_fail_what_was_required(echo_file: Path, prompts: Path, tmp_path: Path) -> None:
    other = tmp_path / "loud.py"
    other.write_text((tmp_path / "echo.py").read_text().replace('words.pop(0) + " "', 'words.pop(0).upper() + " "'))
    overlay = tmp_path / "loud.yaml"
    overlay.write_text('stages:\n  echo: {use: "./loud.py:Echo"}\n')
    result = run(echo_file, "-o", overlay, "--on", prompts, "--rounds", 1, "--require", "answers == same")
    assert result.exit_code == 1
    assert "answers differ in 2 of 2" in result.output
    assert "'ONE TWO THREE '" in result.output


def test_mistakes_are_told_before_anything_runs(echo_file: Path, tmp_path: Path) -> None:
    assert "A and B are the same" in run(echo_file).output
    assert "no figure 'speed'" in run(echo_file, echo_file, "--require", "speed > 1x").output
    wrong = run(echo_file, "--set", "stages.echo.with.delai=1")
    assert wrong.exit_code == 1 and "delai" in wrong.output


def test_the_builtin_mix_shares_a_prefix() -> None:
    asks = load_asks("builtin")
    assert len(asks) == 12
    systems = [ask.body["messages"][0]["content"] for ask in asks if len(ask.body.get("messages", ())) == 2]
    assert len(systems) == 3 and len(set(systems)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", ":1: not JSON"), ('{"text": "a"}', ":1: a line holds either"), ("", "holds no requests")],
)
def test_a_file_of_requests_that_cannot_be_read(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(line)
    with pytest.raises(FlowInferError, match=message):
        load_asks(str(file))


def test_lines_of_the_batch_format_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    body = {"model": "m", "messages": [], "max_tokens": 3}
    file.write_text(json.dumps({"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    (ask,) = load_asks(str(file))
    assert (ask.name, ask.body) == ("q", {"messages": [], "max_tokens": 3})


def test_both_sides_as_services(echo_file: Path, prompts: Path) -> None:
    slow = ["--set", "stages.echo.with.delay=0.02", "--rounds", 3, "--in-flight", 2, "--real"]
    result = run(echo_file, *slow, "--on", prompts, "--require", "answers == same, latency_p50 >= 1.0x")
    assert result.exit_code == 0, result.output
    assert re.search(r"memory +\d+MiB +\d+MiB", result.output)
