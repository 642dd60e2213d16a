"""Every file in bad/ has one mistake; its first line says which code, line and column the check must give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowinfer.cli.explain import entries
from flowinfer.errors import Problem, SpecError
from flowinfer.graph.checker import check
from flowinfer.spec import load

BAD = Path(__file__).parent / "bad"
FILES = sorted(BAD.glob("*.yaml"))
EXPECT = re.compile(r"# expect: (FI\d{3})(?: (\d+):(\d+))?( no-local)?$")


def problems_of(file: Path) -> tuple[Problem, ...]:
    allow_local = not file.read_text().split("\n", 1)[0].endswith("no-local")
    try:
        return tuple(check(load(file, allow_local=allow_local)).problems)
    except SpecError as error:
        return error.problems


def expected(file: Path) -> tuple[str, int, int]:
    match = EXPECT.match(file.read_text().split("\n", 1)[0])
    assert match, f"{file.name} doesn't say what to expect"
    return match[1], int(match[2] or 1), int(match[3] or 1)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_mistake_is_found_at_its_place(file: Path) -> None:
    found = [(p.code, p.mark.line, p.mark.column) for p in problems_of(file) if p.mark]
    assert found == [expected(file)]


def test_every_code_has_a_bad_file_and_an_explanation() -> None:
    root = BAD.parents[2] / "flowinfer"
    sources = [*root.glob("[sg][pr][ea]*/*.py"), *root.glob("testing/*.py")]
    used = set(re.findall(r'"(FI\d{3})"', "".join(path.read_text() for path in sources)))
    # A path, an option, a machine, a model's files: see tests/spec, test_devices.py and test_weights.py.
    elsewhere = {"FI101", "FI114", "FI414", "FI326"}
    assert used == set(entries())
    of_tests = {code for code in used if code.startswith("FI5")}  # see tests/testing
    assert {expected(file)[0] for file in FILES} == used - elsewhere - of_tests
