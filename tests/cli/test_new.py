"""`flowinfer new stage`: what it writes works as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.new import write_stage
from flowinfer.errors import FlowInferError
from flowinfer.graph.checker import check
from flowinfer.spec import load

ROOT = Path(__file__).parents[2]


def test_the_tests_of_a_new_stage_pass_at_once_and_fail_when_it_breaks(tmp_path: Path) -> None:
    folder = write_stage("my-router", tmp_path)
    command = [sys.executable, "-m", "flowinfer", "test", str(folder)]
    passed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "2 passed" in passed.stdout, "in Python"
    assert "3 passed, 0 failed" in passed.stdout, "the stage in its place"
    policy = folder / "policy.py"
    policy.write_text(policy.read_text().replace("> short", "< short"))
    broken = subprocess.run(command, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "the order is ['long', 'short'], expected ['short', 'long']" in broken.stdout


def test_its_overlay_lies_over_every_shipped_pipeline(tmp_path: Path) -> None:
    overlay = write_stage("my-router", tmp_path) / "my-router.yaml"
    for name in ("quickstart", "prod", "colocated"):
        checked = check(load(ROOT / "pipelines" / f"{name}.yaml", [overlay], allow_local=True))
        assert checked.problems == []
        assert "my-router" in checked.stages


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    write_stage("my-router", tmp_path)
    with pytest.raises(FlowInferError, match="already there"):
        write_stage("my-router", tmp_path)


@pytest.mark.parametrize("name", ["My", "a_b", "1st", "a--b", "class", "../up"])
def test_a_name_that_no_stage_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FlowInferError, match="can't be the name"):
        write_stage(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_lists_what_it_wrote(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["new", "stage", "my-router", "--into", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"Next: flowinfer test {tmp_path / 'my_router'}" in result.output
