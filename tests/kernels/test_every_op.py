"""Every op folder is whole: a checked public function, a plain reference, tests, a benchmark, and its table row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flowinfer.kernels import arch, table

ROOT = Path(__file__).parents[2]
OPS = table.folders()


def source(op: str) -> str:
    return (table.FOLDER / op / "__init__.py").read_text()


def exported(op: str) -> set[str]:
    """Names in its __all__ that are functions, defined here or taken from its own modules."""
    tree = ast.parse(source(op))
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "__all__"]
    return {element.value for element in lists[0].elts if isinstance(element, ast.Constant)}  # type: ignore[attr-defined]


def _name(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def using(op: str, *folders: Path) -> list[str]:
    """Files there that import the op."""
    said = re.compile(rf"flowinfer\.kernels\.{op}\b|from flowinfer\.kernels import [^\n]*\b{op}\b")
    return [path.name for folder in folders for path in folder.glob("*.py") if said.search(path.read_text())]


@pytest.mark.parametrize("op", OPS)
def test_its_function_is_public_and_checks_what_it_is_given(op: str) -> None:
    functions = {node.name for node in ast.parse(source(op)).body if isinstance(node, ast.FunctionDef)}
    assert functions & exported(op), "a function of its own in __all__"
    assert "raise KernelUnsupported" in source(op)


@pytest.mark.parametrize("op", OPS)
def test_its_meaning_is_there_in_plain_torch(op: str) -> None:
    assert any(name.endswith("_reference") for name in exported(op)) or (table.FOLDER / op / "reference.py").exists()


@pytest.mark.parametrize("op", OPS)
def test_it_has_tests_and_a_benchmark(op: str) -> None:
    assert [name for name in using(op, ROOT / "tests/kernels", table.FOLDER / op) if name.startswith("test_")]
    assert using(op, ROOT / "tests/bench"), "add it to tests/bench/op_cases.py"


@pytest.mark.parametrize("op", OPS)
def test_it_has_a_row_in_the_table(op: str) -> None:
    assert op in arch.BY_OP


def test_the_table_that_is_read_is_the_one_that_is_used() -> None:
    assert table.FILE.read_text() == table.render(), "run: python -m flowinfer.kernels.table"
