"""The commands that start nothing: what they print, and how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from flowinfer.cli import COMMANDS, main
from flowinfer.cli.report import render
from flowinfer.spec.registry import builtin_kinds
from flowinfer.spec.schema import json_schema
from flowinfer.spec.tree import read_tree

PIPELINES = Path(__file__).parents[2] / "pipelines"
PROD = str(PIPELINES / "prod.yaml")
EXPERIMENT = str(PIPELINES / "experiments/no-speculation.yaml")


def plain(text: str) -> object:
    """As an editor sees it: `!drop` is an empty value."""
    node = read_tree(text, "f.yaml")[0]
    return node.plain() if node else None


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    file = tmp_path / "broken.yaml"
    file.write_text(Path(PROD).read_text().replace("draft: head", "draft: haed"))
    return file


def test_check_of_a_right_file_says_what_it_comes_to() -> None:
    result = run("check", PROD)
    assert result.exit_code == 0
    assert "8 stages, 10 edges, 3 workers (3 processes)" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["lookup", "->", "prefill", "Prompt", "ipc", "bucket", "bucket,", "prefix,", "tokens"] in rows
    assert any(row[:5] == ["prefill", "->", "transfer", "Sequence", "ipc"] and row[5].startswith("kv:") for row in rows)


def test_check_points_at_the_mistake_and_exits_with_1(broken: Path) -> None:
    result = run("check", str(broken))
    assert result.exit_code == 1
    lines = result.stderr.split("\n")
    line = next(i for i, text in enumerate(lines) if "verify:" in text)
    column = lines[line].index("haed")
    assert lines[0].startswith("error FI210: `draft` of stage `verify`: it must be `")
    assert lines[line + 1][column : column + 4] == "^^^^"
    assert "help: Did you mean `head`?" in result.stderr


def test_check_as_json_for_programs(broken: Path) -> None:
    (problem,) = json.loads(run("check", "--json", str(broken)).stdout)["problems"]
    assert (problem["code"], problem["file"], problem["line"]) == ("FI210", str(broken), 26)
    plan = json.loads(run("check", "--json", PROD).stdout)["plan"]
    assert plan["name"] == "prod"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_report_keeps_to_the_width(width: int, tmp_path: Path) -> None:
    from flowinfer.graph.checker import check
    from flowinfer.spec import load

    file = tmp_path / "x.yaml"
    file.write_text(
        Path(PROD).read_text().replace("tokens: 5", "tokns: 5").replace("verify -> detokenize", "verify -> api")
    )
    document = load(file)
    text = render(check(document).problems, document.sources, width=width)
    assert max(len(line) for line in text.split("\n") if "-->" not in line) <= width


def test_show_prints_a_file_that_checks_to_the_same_plan(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(run("show", EXPERIMENT).stdout)
    first, second = (json.loads(run("check", "--json", file).stdout)["plan"] for file in (str(shown), PROD))
    assert first["stages"]["verify"]["config"]["draft"] == "none"
    assert first["edges"] == second["edges"]


def test_show_origin_names_file_and_line_or_the_option() -> None:
    text = run("show", "--origin", EXPERIMENT, "--set", "serve.port=9").stdout
    assert any(line.split() == ["port:", "9", "#", "--set"] for line in text.split("\n"))
    assert "draft: none" in text and "experiments/no-speculation.yaml:7" in text


def test_graph_writes_svg(tmp_path: Path) -> None:
    out = tmp_path / "g.svg"
    assert run("graph", "-f", "svg", "--out", str(out), PROD).exit_code == 0
    assert out.read_text().startswith("<svg ")


def test_a_file_that_cannot_be_written_is_told_without_a_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["graph", str(PIPELINES / "quickstart.yaml"), "--out", str(tmp_path / "no" / "x")]
    )
    assert result.exit_code == 1 and "error: No such file or directory: " in result.output


def test_stages_lists_every_kind_and_shows_settings_with_units() -> None:
    listed = run("stages").stdout
    assert all(kind in listed for kind in builtin_kinds())
    one = run("stages", "prefill").stdout
    assert "step_budget" in one and "duration | auto" in one and "adds kv" in one


def test_explain_knows_each_code_and_refuses_others() -> None:
    assert "Right:" in run("explain", "fi309").stdout
    result = run("explain", "FI999")
    assert result.exit_code == 1 and "There is no error FI999" in result.stderr


def test_unknown_command_is_a_mistake_of_the_command_line() -> None:
    result = run("chekc", PROD)
    assert result.exit_code == 2 and "Did you mean `check`?" in result.stderr


def test_help_lists_every_command_without_importing_them() -> None:
    assert all(name in run("--help").stdout for name in COMMANDS)


def test_local_files_need_leave(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from collections.abc import Iterable\nfrom flowinfer.message import Prompt\n"
        "from flowinfer.stage import Stage\n"
        "class Mine(Stage):\n    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:\n        return prompts\n"
    )
    file = tmp_path / "x.yaml"
    file.write_text(
        Path(PROD).read_text().replace("{use: bucket-route", "{use: './mine.py:Mine'").replace("{dispatch: bucket}", "")
    )
    text = file.read_text()
    file.write_text(text.replace(", with: {buckets: {short: 2k, medium: 16k, long: 64k, huge: 256k}}", ""))
    assert "FI208" in run("check", str(file)).stderr
    assert run("check", "--allow-local", str(file)).exit_code == 0


# ------------------------------------------------------------------------------------------------------------ schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def test_schema_is_valid_draft_2020_12(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("file", sorted(PIPELINES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_validate(file: Path, schema: dict[str, Any]) -> None:
    if not file.stem.endswith("_test"):
        jsonschema.Draft202012Validator(schema).validate(plain(file.read_text()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tokens: 5", "tokns: 5"),
        ("tokens: 5", "tokens: 99"),
        ("draft: head", "draft: haed"),
        ("step_budget: 50ms", "step_budget: 50"),
        ("dispatch: bucket", "dispatch: buckets"),
        ("verify -> detokenize:", "verify > detokenize:"),
        ("port: 8000", "port: 99999"),
    ],
)
def test_schema_refuses_what_check_refuses(old: str, new: str, schema: dict[str, Any]) -> None:
    text = Path(PROD).read_text()
    assert old in text
    assert not jsonschema.Draft202012Validator(schema).is_valid(plain(text.replace(old, new)))


# ------------------------------------------------------------------------------------------------------------- speed


def test_check_imports_neither_torch_nor_networkx_nor_http() -> None:
    code = (
        "import sys; from flowinfer.cli import main\n"
        f"try: main(['check', {PROD!r}])\n"
        "except SystemExit as e: assert e.code in (0, None), e.code\n"
        "heavy = {'torch', 'networkx', 'starlette', 'uvicorn', 'zmq', 'rich', 'transformers', 'tokenizers'}\n"
        "bad = heavy & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
