"""The README's examples work as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
