"""`flowinfer batch` answers every line once, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.journal import Journal
from flowinfer.errors import FlowInferError

COMMAND = [sys.executable, "-c", "from flowinfer.cli import main; main()", "batch"]


def line(custom_id: str, text: str = "hello world", **more: Any) -> dict[str, Any]:
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]} | more.pop("body", {})
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | more


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def run(echo_file: Path, source: Path, output: Path, *more: str) -> Any:
    args = ["batch", str(echo_file), "-i", str(source), "-o", str(output), "--allow-local", *more]
    return CliRunner().invoke(main, args)


def test_lines_are_answered_in_the_batch_format(echo_file: Path, tmp_path: Path) -> None:
    chat = line("a")
    plain = line("b", url="/v1/completions") | {"body": {"model": "echo", "prompt": "one two", "n": 2}}
    source, output = write(tmp_path / "in.jsonl", [chat, "", plain]), tmp_path / "out.jsonl"
    result = run(echo_file, source, output)
    assert result.exit_code == 0, result.output
    by_id = {answer["custom_id"]: answer for answer in answers(output)}
    assert by_id["a"]["error"] is None
    assert by_id["a"]["response"]["status_code"] == 200
    assert by_id["a"]["response"]["request_id"]
    assert by_id["a"]["response"]["body"]["choices"][0]["message"]["content"] == "hello world "
    assert [choice["text"] for choice in by_id["b"]["response"]["body"]["choices"]] == ["one two ", "one two "]


def test_each_bad_line_has_its_own_error_and_the_others_their_answer(echo_file: Path, tmp_path: Path) -> None:
    lines = [
        line("good"),
        line("field", body={"temperature": 9}),
        line("model", body={"model": "gpt"}),
        line("stream", body={"stream": True}),
        line("url", url="/v1/embeddings"),
        line("method", method="GET"),
        line("stage", "fail"),
        "{not json",
        {"custom_id": "short"},
    ]
    output = tmp_path / "out.jsonl"
    result = run(echo_file, write(tmp_path / "in.jsonl", lines), output)
    assert result.exit_code == 0, result.output
    got = answers(output)
    status = {answer["custom_id"]: answer["response"]["status_code"] for answer in got if answer["response"]}
    assert status == {"good": 200, "field": 400, "model": 404, "stream": 400, "url": 400, "method": 400, "stage": 400}
    params = {answer["custom_id"]: answer["response"]["body"].get("error", {}) for answer in got if answer["response"]}
    assert params["field"]["param"] == "temperature"
    assert params["stage"]["code"] == "asked"
    unread = [answer["error"]["message"] for answer in got if answer["custom_id"] is None]
    assert sorted(message.split(":")[0] for message in unread) == ["line 8", "line 9"]


def test_a_custom_id_used_twice_is_an_error_up_front(echo_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = run(echo_file, write(tmp_path / "in.jsonl", [line("a"), line("b"), line("a")]), output)
    assert result.exit_code == 1
    assert "'a'" in result.output
    assert "1 and 3" in result.output
    assert not output.exists()


def test_what_is_answered_is_not_asked_again(echo_file: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [line("a"), "{bad", line("b")]), tmp_path / "out.jsonl"
    assert run(echo_file, source, output).exit_code == 0
    before = output.read_bytes()
    assert run(echo_file, source, output).exit_code == 0
    assert output.read_bytes() == before


def test_a_torn_last_line_is_cut_and_answered_again(echo_file: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [line("a"), line("b"), line("c")]), tmp_path / "out.jsonl"
    assert run(echo_file, source, output).exit_code == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-30])
    assert run(echo_file, source, output).exit_code == 0
    assert sorted(answer["custom_id"] for answer in answers(output)) == ["a", "b", "c"]


@pytest.mark.parametrize("content", ["hello\n", '{"custom_id": "other"}\n', "{}\n"])
def test_a_file_of_something_else_is_left_alone(echo_file: Path, tmp_path: Path, content: str) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    result = run(echo_file, write(tmp_path / "in.jsonl", [line("a")]), output)
    assert result.exit_code == 1
    assert output.read_text() == content


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    first = Journal(tmp_path / "out.jsonl")
    with pytest.raises(FlowInferError, match="another run"):
        Journal(tmp_path / "out.jsonl")
    first.close()
    Journal(tmp_path / "out.jsonl").close()


def test_no_line_is_lost_or_repeated_when_runs_are_killed(echo_file: Path, tmp_path: Path) -> None:
    wanted = [f"r{number}" for number in range(300)]
    source = write(tmp_path / "in.jsonl", [line(id, f"text of {id}") for id in wanted])
    output = tmp_path / "out.jsonl"
    args = [str(echo_file), "-i", str(source), "-o", str(output), "--allow-local", "--in-flight", "8"]
    args += ["--set", "stages.echo.with.delay=0.005"]
    for part in (0.2, 0.5):
        _run_until(args, output, int(len(wanted) * part))
        assert len(output.read_bytes().splitlines()) < len(wanted), "killed too late to prove anything"
    done = subprocess.run([*COMMAND, *args], env=_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    got = answers(output)
    assert sorted(answer["custom_id"] for answer in got) == sorted(wanted)
    assert all(
        answer["response"]["body"]["choices"][0]["message"]["content"] == f"text of {answer['custom_id']} "
        for answer in got
    )


def _run_until(args: list[str], output: Path, num_lines: int) -> None:
    """Starts a run and kills it, with no time to tidy up, once the output has so many lines."""
    process = subprocess.Popen([*COMMAND, *args], env=_env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def _env() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "NO_COLOR": "1"}
