"""The README's examples work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from flowinfer.cli.summary import summary
from flowinfer.graph.checker import check
from flowinfer.graph.drawing import draw
from flowinfer.runtime.local import LocalService
from flowinfer.spec import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(mark: str) -> str:
    """The code block that follows a mark."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"no block behind {mark}"
    return found[1]


def write_example(folder: Path) -> Path:
    (folder / "shout.py").write_text(block("file: shout.py"))
    file = folder / "loud.yaml"
    file.write_text(block("file: loud.yaml").replace("pipelines/", f"{ROOT}/pipelines/"))
    return file


def test_the_stage_example_checks_and_is_fifteen_lines(tmp_path: Path) -> None:
    file = write_example(tmp_path)
    assert check(load(file, allow_local=True)).problems == []
    code = [line for line in block("file: shout.py").splitlines() if line.strip()]
    assert len(code) <= 15


def test_the_guarded_example_checks(tmp_path: Path) -> None:
    file = tmp_path / "guarded.yaml"
    file.write_text(block("file: guarded.yaml").replace("pipelines/", f"{ROOT}/pipelines/"))
    assert check(load(file)).problems == []


def test_the_stage_example_answers(tmp_path: Path) -> None:
    """In a graph of two plain stages, so that no model is needed."""
    write_example(tmp_path)
    (tmp_path / "echo.py").write_text(
        "from collections.abc import Iterable\n"
        "from flowinfer.message import Call, Finish, Piece, Text\n"
        "from flowinfer.stage import Stage\n"
        "class Echo(Stage):\n"
        "    def step(self, calls: list[Call]) -> Iterable[Text]:\n"
        "        for call in calls:\n"
        "            yield Text(step=1, pieces=[Piece(id=call.id, text=call.prompt, finish=Finish(reason='stop'))])\n"
    )
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "flowinfer: 1\n"
        "stages:\n"
        "  echo: {use: './echo.py:Echo'}\n"
        "  shout: {use: './shout.py:Shout', with: {mark: '!!'}}\n"
        "edges:\n  api -> echo:\n  echo -> shout:\n  shout -> api:\n"
    )
    from flowinfer.graph import load_plan
    from flowinfer.message import Call, Sampling

    with LocalService(load_plan(file, allow_local=True)) as service:
        (pieces,) = service.generate([Call(id="a", sampling=Sampling(), prompt="hello")]).values()
    assert isinstance(pieces, list)
    assert "".join(piece.text for piece in pieces) == "HELLO!!"


def test_the_overlay_is_the_shipped_one() -> None:
    shipped = (ROOT / "pipelines" / "experiments" / "first-come.yaml").read_text()
    overlay = re.search(r"```yaml\n(extends: \.\./prod\.yaml.*?)```", README, re.DOTALL)
    assert overlay
    assert overlay[1] in shipped


def test_the_experiment_is_the_shipped_one_and_checks_as_shown() -> None:
    name = "pipelines/experiments/live-no-speculation.yaml"
    overlay = re.search(r"```yaml\n(extends: \.\./prod\.yaml\n\nexperiment:.*?)```", README, re.DOTALL)
    assert overlay and overlay[1] in (ROOT / name).read_text()
    shown = re.search(rf"\$ flowinfer check {name}\n(.*?)```", README, re.DOTALL)
    checked = check(load(ROOT / name))
    assert shown and summary(checked).replace(f"{ROOT}/", "").startswith(shown[1].strip())


def test_the_picture_is_current() -> None:
    drawn = draw(check(load(ROOT / "pipelines" / "prod.yaml")), "svg")
    assert (ROOT / "pipelines" / "prod.svg").read_text().strip() == drawn.strip(), "run flowinfer graph -f svg --out"


def test_every_command_of_the_readme_exists() -> None:
    commands = set(re.findall(r"`?flowinfer (\w+)", README)) - {"is"}
    listed = subprocess.run(
        [sys.executable, "-m", "flowinfer", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {command for command in commands if not re.search(rf"^  {command} ", listed, re.MULTILINE)} == set()


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def run_block(mark: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs a block of one command as it stands, in a folder of its own beside the pipelines."""
    program, *arguments = shlex.split(block(mark).replace("\\\n", " "))
    assert program == "flowinfer"
    if not (folder / "pipelines").exists():
        (folder / "pipelines").symlink_to(ROOT / "pipelines")
    words = [sys.executable, "-m", "flowinfer", *arguments, *more]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=env)


def test_a_stage_authors_day_begins(tmp_path: Path) -> None:
    assert "flowinfer test my_router" in run_block("day: new", tmp_path).stdout
    tested = run_block("day: test", tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout


def test_a_stage_authors_day_ends_with_a_verdict(tmp_path: Path) -> None:
    run_block("day: new", tmp_path)
    (tmp_path / "few.jsonl").write_text('{"chat": "Hello", "max_tokens": 2}\n{"prompt": "One two", "max_tokens": 2}\n')
    compared = run_block("day: compare", tmp_path, "--rounds", "2", "--on", "few.jsonl")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "95 % interval" in compared.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
