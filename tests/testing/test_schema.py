"""The JSON Schema of test files accepts what is shipped and refuses what a reader refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.spec.tree import read_tree

PIPELINES = Path(__file__).parents[2] / "pipelines"
FAULTS = (PIPELINES / "prod_faults_test.yaml").read_text()


@pytest.fixture(scope="module")
def schema() -> Any:
    return json.loads(CliRunner().invoke(main, ["schema", "--tests"]).output)


def plain(text: str) -> Any:
    node, problems = read_tree(text, "x_test.yaml")
    assert node is not None and not problems
    return node.plain()


def test_it_is_a_schema_and_says_what_each_key_means(schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        assert [key for key, value in part["properties"].items() if not value.get("description")] == []


@pytest.mark.parametrize("file", sorted(PIPELINES.rglob("*_test.yaml")), ids=lambda path: path.stem)
def test_shipped_tests_validate(file: Path, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(plain(file.read_text()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("faults:", "fault:"),
        ("{kill: decode,", "{kil: decode,"),
        ("by: 2s", "by: 2"),
        ("message: 2}", "message: 0}"),
        ("error: 504", "error: gone"),
        ("failed: 2", "failed: two"),
        ("mock: [{from: prefill, to: verify, worker: decode}]", "mock: [{to: verify}]"),
    ],
)
def test_it_refuses_what_a_reader_refuses(old: str, new: str, schema: Any) -> None:
    assert old in FAULTS
    assert not jsonschema.Draft202012Validator(schema).is_valid(plain(FAULTS.replace(old, new)))
