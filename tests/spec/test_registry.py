"""Where stages are found: built in, in installed packages, in local files; and what is said when they aren't."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowinfer.spec import registry
from flowinfer.spec.registry import StageNotFound, builtin_kinds, canonical, installed_kinds, load_stage
from flowinfer.stage import Stage, ports

SOURCE = '''
from collections.abc import Iterable
from flowinfer.message import Prompt
from flowinfer.stage import Stage

class Shout(Stage):
    """Passes prompts on."""
    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        return prompts
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package that brings the kind `shout`, and another that is broken."""
    (tmp_path / "shouting.py").write_text(SOURCE)
    info = tmp_path / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowinfer.stages]\nshout = shouting:Shout\nlost = nowhere:Lost\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    yield "shout"
    registry._entry_points.cache_clear()


@pytest.mark.parametrize("kind", builtin_kinds())
def test_built_in_stages_load_and_say_their_ports(kind: str) -> None:
    stage = load_stage(kind)
    assert issubclass(stage, Stage) and stage.kind == kind
    assert ports(stage)[0]


def test_installed_packages_bring_kinds(package: str) -> None:
    assert installed_kinds()[package] == "shouting:Shout"
    assert load_stage(package).__name__ == "Shout"


def test_a_broken_package_is_named(package: str) -> None:
    with pytest.raises(StageNotFound, match="`lost` can't be imported: ModuleNotFoundError") as caught:
        load_stage("lost")
    assert caught.value.code == "FI207"


def test_local_files_load_only_with_leave(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(StageNotFound, match="--allow-local"):
        load_stage("./mine.py:Shout", base=tmp_path)
    assert load_stage("./mine.py:Shout", base=tmp_path, allow_local=True).__name__ == "Shout"


def test_local_files_get_absolute_names_so_that_workers_find_them(tmp_path: Path) -> None:
    assert canonical("./mine.py:Shout", tmp_path) == f"{tmp_path}/mine.py:Shout"
    assert canonical("prefill", tmp_path) == "prefill"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no \\(broken.py:1\\)"),
        ("x = (", "SyntaxError"),
        ("import sys; sys.exit()", "Exit"),
    ],
)
def test_local_files_that_break_are_named_with_their_line(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(StageNotFound, match=text):
        load_stage("./broken.py:X", base=tmp_path, allow_local=True)


def test_a_misspelt_class_asks_for_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(StageNotFound) as caught:
        load_stage("./mine.py:Shuot", base=tmp_path, allow_local=True)
    assert caught.value.help == "Did you mean `Shout`?"


def test_a_misspelt_kind_asks_for_the_right_one() -> None:
    with pytest.raises(StageNotFound) as caught:
        load_stage("moe_decoder")
    assert caught.value.help == "Did you mean `moe-decode`?"
