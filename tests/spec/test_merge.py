"""Overlays, --set and variables: what wins, what goes, and where a value says it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.errors import Mark, Problem, SpecError
from flowinfer.spec import Document, load
from flowinfer.spec.merge import merge
from flowinfer.spec.tree import Node, read_tree

# Keys tell what they hold, as in a pipeline file: a value laid over a map, and a map over that, depends on the order.
leaves = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9), max_size=3)


def nest(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    return st.builds(lambda a, b: {**a, **b}, leaves, st.dictionaries(st.sampled_from("abc"), inner, max_size=2))


maps = nest(nest(leaves))


def tree_of(value: object) -> Node:
    if isinstance(value, dict):
        return Node({key: tree_of(item) for key, item in value.items()}, Mark("x", 1, 1))
    assert isinstance(value, int)
    return Node(value, Mark("x", 1, 1))


def merged(a: object, b: object) -> object:
    problems: list[Problem] = []
    result = merge(tree_of(a), tree_of(b), problems).plain()
    assert problems == []
    return result


@given(maps, maps, maps)
def test_merging_is_associative(a: object, b: object, c: object) -> None:
    assert merged(merged(a, b), c) == merged(a, merged(b, c))


@given(maps)
def test_merging_with_nothing_or_itself_changes_nothing(a: object) -> None:
    assert merged(a, {}) == merged({}, a) == merged(a, a) == a


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def plain(document: Document, *path: str) -> object:
    node = document.root.at(*path)
    return node.plain() if node else None


def codes(document: Document) -> list[str]:
    return [problem.code for problem in document.problems if problem.code.startswith("FI1")]


BASE = "flowinfer: 1\nstages:\n  v: {use: spec-verify, with: {draft: ngram, tokens: 5}}\n  d: {use: detokenize}\n"


def test_overlay_is_found_relative_to_itself_and_merges_deep(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base=BASE)
    over = write(tmp_path / "sub", over="extends: ../base.yaml\nstages: {v: {with: {tokens: 3}}}\n")
    document = load(over)
    assert plain(document, "stages", "v", "with") == {"draft": "ngram", "tokens": 3}
    assert document.value_mark("stages", "v", "with", "tokens") == Mark(str(over), 2, 29)
    assert document.value_mark("stages", "v", "with", "draft").file == str(tmp_path / "base.yaml")


def test_another_kind_drops_the_settings_of_the_first(tmp_path: Path) -> None:
    file = write(tmp_path, over="extends: base.yaml\nstages: {v: {use: detokenize}}\n", base=BASE)
    assert plain(load(file), "stages", "v") == {"use": "detokenize"}


def test_naming_the_same_kind_keeps_them(tmp_path: Path) -> None:
    file = write(tmp_path, over="extends: base.yaml\nstages: {v: {use: spec-verify}}\n", base=BASE)
    assert plain(load(file), "stages", "v", "with", "tokens") == 5


def test_drop_removes(tmp_path: Path) -> None:
    file = write(tmp_path, over="extends: base.yaml\nstages:\n  d: !drop\n", base=BASE)
    assert plain(load(file), "stages", "d") is None


def test_drop_of_a_misspelt_key_asks_for_the_right_one(tmp_path: Path) -> None:
    file = write(tmp_path, over="extends: base.yaml\nstages:\n  verfy: !drop\n", base=BASE.replace(" v:", " verify:"))
    (problem,) = [p for p in load(file).problems if p.code == "FI113"]
    assert problem.help == "Did you mean `verify`?"


def test_edge_keys_are_one_whatever_their_spaces(tmp_path: Path) -> None:
    over = "extends: base.yaml\nedges: {a->b: {capacity: 2}}\n"
    file = write(tmp_path, over=over, base="flowinfer: 1\nedges:\n  a -> b: {dispatch: pull}\n")
    assert plain(load(file), "edges") == {"a -> b": {"dispatch": "pull", "capacity": 2}}


def test_overlays_on_the_command_line_stand_above_the_file_and_sets_above_all(tmp_path: Path) -> None:
    file = write(tmp_path, base=BASE, o="stages: {v: {with: {tokens: 3}}}", p="stages: {v: {with: {tokens: 2}}}")
    overlays = [tmp_path / "o.yaml", tmp_path / "p.yaml"]
    assert plain(load(file, overlays), "stages", "v", "with", "tokens") == 2
    document = load(file, overlays, ["stages.v.with.tokens=1"])
    assert plain(document, "stages", "v", "with", "tokens") == 1
    assert document.value_mark("stages", "v", "with", "tokens") == Mark("--set", 1, 22)


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("stages.v.with.draft=none", ("stages", "v", "with", "draft"), "none"),
        ("serve.apis=[openai, anthropic]", ("serve", "apis"), ["openai", "anthropic"]),
        ("edges.a -> b.capacity=4", ("edges", "a -> b", "capacity"), 4),
        ("edges.a.x -> b.y.back=true", ("edges", "a.x -> b.y", "back"), True),
        ('edges."a -> b".key=id', ("edges", "a -> b", "key"), "id"),
        ("name=", ("name",), ""),
        ("vars.model=null", ("vars", "model"), None),
    ],
)
def test_set_paths(tmp_path: Path, option: str, path: tuple[str, ...], value: object) -> None:
    file = write(tmp_path, base=BASE + "vars: {model: x}\n")
    document = load(file, sets=[option])
    assert plain(document, *path) == value
    assert codes(document) == []


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ("stages.v", "FI114"),
        ("=3", "FI114"),
        ("a..b=3", "FI114"),
        ("serve.port=on", "FI104"),
        ("a=[1", "FI102"),
        ("vars.modle=x", "FI115"),
    ],
)
def test_wrong_sets(tmp_path: Path, option: str, code: str) -> None:
    document = load(write(tmp_path, base=BASE + "vars: {model: x}\n"), sets=[option])
    assert codes(document) == [code]
    assert document.problems[0].mark is not None and document.problems[0].mark.file == "--set"


def test_variables_keep_their_type_and_say_where_they_came_from(tmp_path: Path) -> None:
    text = "flowinfer: 1\nvars: {n: 2, m: smol, t: {memory: 1GiB}}\n"
    text += 'x: {a: "${n}", b: "${m}-${n}", c: "${t}", d: "$${n}"}\n'
    document = load(write(tmp_path, base=text))
    assert plain(document, "x") == {"a": 2, "b": "smol-2", "c": {"memory": "1GiB"}, "d": "${n}"}
    node = document.root.at("x", "a")
    assert node is not None and node.via is not None and (node.mark.line, node.via.line) == (3, 2)


def test_variables_are_filled_in_after_the_merge(tmp_path: Path) -> None:
    file = write(tmp_path, over="extends: base.yaml\nvars: {n: 3}\n", base='vars: {n: 2}\nx: "${n}"\n')
    assert plain(load(file), "x") == 3


@pytest.mark.parametrize("base", ["2", "4"])
def test_variables_that_multiply_are_stopped(tmp_path: Path, base: str) -> None:
    lines = [f'  v{i}: ["${{v{i + 1}}}", "${{v{i + 1}}}", "${{v{i + 1}}}", "${{v{i + 1}}}"]' for i in range(12)]
    document = load(write(tmp_path, base="vars:\n" + "\n".join(lines) + f"\n  v12: {base}\n"))
    assert "FI117" in codes(document)


def test_missing_file_and_folder_are_errors_without_a_traceback(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SpecError) as caught:
            load(path)
        assert [problem.code for problem in caught.value.problems] == ["FI101"]


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"a: \xff")
    with pytest.raises(SpecError, match="UTF-8"):
        load(tmp_path / "x.yaml")


def test_tree_of_empty_overlay_is_refused() -> None:
    assert read_tree("", "f")[0] is None


def test_a_file_that_cannot_be_read_gets_the_help_that_fits(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    (tmp_path / "folder.yaml").mkdir()
    cases = {"missing": "path and its case", "latin": "UTF-8", "folder": "file of YAML"}
    for name, help in cases.items():
        with pytest.raises(SpecError) as caught:
            load(tmp_path / f"{name}.yaml")
        (problem,) = caught.value.problems
        assert problem.code == "FI101" and help in problem.help, name
