"""YAML with positions: what a bare word means, and where each value stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.errors import Mark
from flowinfer.spec.scalars import resolve_plain
from flowinfer.spec.show import to_yaml
from flowinfer.spec.tree import Node, read_tree

words = st.text(max_size=8) | st.sampled_from(
    ["yes", "012", "1:2", "null", "true", "1e3", "${a}", "a b", "- x", "#", "'"]
)
scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | words
keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=6)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)


def tree_of(value: object) -> Node:
    mark = Mark("x", 1, 1)
    if isinstance(value, dict):
        return Node({key: tree_of(item) for key, item in value.items()}, mark)
    if isinstance(value, list):
        return Node(tuple(tree_of(item) for item in value), mark)
    assert value is None or isinstance(value, (str, int, float, bool))
    return Node(value, mark)


def read(text: str) -> Node:
    node, problems = read_tree(text, "f.yaml")
    assert node is not None and problems == []
    return node


def test_values_and_keys_know_their_place() -> None:
    node = read("a:\n  b: [1, {c: x}]\n").at("a", "b", 1, "c")
    assert node is not None
    assert (node.mark, node.key) == (Mark("f.yaml", 2, 14), Mark("f.yaml", 2, 11))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("true", True),
        ("12", 12),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("2k", "2k"),
        ("cuda:0", "cuda:0"),
        ("1.2.3", "1.2.3"),
        ("nan", "nan"),
        (".inf", ".inf"),
        ("1e999", "1e999"),
        ("y", "y"),
    ],
)
def test_bare_words(text: str, value: object) -> None:
    assert resolve_plain(text) == (value, None)


@pytest.mark.parametrize("word", ["yes", "No", "ON", "off"])
def test_switch_words_are_traps_unless_quoted(word: str) -> None:
    assert [problem.code for problem in read_tree(f"a: {word}", "f")[1]] == ["FI104"]
    assert read(f"a: '{word}'").plain() == {"a": word}


def test_a_merge_key_is_refused_unless_quoted() -> None:
    assert [problem.code for problem in read_tree("<<: {}", "f")[1]] == ["FI107"]
    assert read("'<<': 1").plain() == {"<<": 1}


def test_first_of_two_equal_keys_stays_so_that_checking_can_go_on() -> None:
    node, problems = read_tree("a: 1\na: 2\n", "f")
    assert node is not None and node.plain() == {"a": 1}
    assert problems[0].notes[0][0] == Mark("f", 1, 1)


def test_nesting_without_end_is_refused_without_recursion() -> None:
    assert [problem.code for problem in read_tree("[" * 900, "f")[1]] == ["FI111"]


@given(st.dictionaries(keys, values, max_size=4))
def test_what_show_writes_reads_back_the_same(value: dict[str, object]) -> None:
    value = {key: item for key, item in value.items() if key != "extends"}
    node, problems = read_tree(to_yaml(tree_of(value)) or "{}", "f")
    assert problems == [] and node is not None
    assert node.plain() == unescaped(value)


def unescaped(value: object) -> object:
    """Before variables are filled in, a plain `${` still has its second dollar."""
    if isinstance(value, dict):
        return {key: unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unescaped(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
