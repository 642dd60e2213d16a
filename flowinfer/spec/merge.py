"""Lays one tree over another: overlays, `!drop`, `use` that replaces `with`, `--set`. Variables are filled in later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from flowinfer.errors import Mark, Problem
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.tree import Node, read_tree

SET = "--set"
EDGE_FIELDS = ("dispatch", "key", "capacity", "back", "unit")
ARM_PATH = ("experiment", "with")  # an overlay inside the file, which keeps its `!drop`
_SEGMENT = re.compile(r'"([^"]*)"(?=\.|$)|([^.]+)')


def merge(base: Node, over: Node, problems: list[Problem]) -> Node:
    """`over` laid over `base`. Maps merge key by key, everything else is replaced; problems gains what doesn't fit."""
    return _merge(base, over, (), problems)


def _merge(base: Node, over: Node, path: tuple[str, ...], problems: list[Problem]) -> Node:
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return _without_drops(over, problems, path)
    if len(path) == 2 and path[0] == "stages":
        base = _without_stale_settings(base, over)
    members = dict(base.map)
    for key, node in over.value.items():
        if node.drop and path[:2] == ARM_PATH:
            members[key] = node  # what it drops is in the file, over which all of this is laid later
        elif node.drop:
            _drop(members, key, node, path, problems)
        else:
            key = _same_key(members, key, path)
            members[key] = _lay(members.get(key), node, (*path, key), problems)
    # A section that an overlay only adds to keeps its place in the base file.
    return replace(base, value=members)


def _lay(held: Node | None, node: Node, path: tuple[str, ...], problems: list[Problem]) -> Node:
    """A member laid over another, which keeps its key's place: there a reader looks for it first."""
    if held is None:
        return _without_drops(node, problems, path)
    return replace(_merge(held, node, path, problems), key=held.key)


def _same_key(members: dict[str, Node], key: str, path: tuple[str, ...]) -> str:
    """`a->b` and `a -> b` are one edge."""
    if path != ("edges",) or key in members:
        return key
    squeezed = "".join(key.split())
    return next((held for held in members if "".join(held.split()) == squeezed), key)


def _without_stale_settings(base: Node, over: Node) -> Node:
    """Settings belong to a kind: when the overlay names another, those of the base go."""
    old, new = base.map.get("use"), over.map.get("use")
    if old is None or new is None or old.value == new.value:
        return base
    return base.with_map({key: node for key, node in base.map.items() if key != "with"})


def _drop(members: dict[str, Node], key: str, node: Node, path: tuple[str, ...], problems: list[Problem]) -> None:
    key = _same_key(members, key, path)
    if key in members:
        del members[key]
        return
    place = ".".join(path) or "the file"
    message = f"There is no `{key}` in {place} to drop."
    problems.append(Problem("FI113", message, node.where, did_you_mean(key, members)))


def strip_drops(node: Node, problems: list[Problem]) -> Node:
    """The tree of a file that extends nothing: every `!drop` in it is a mistake."""
    return _without_drops(node, problems, ())


def _without_drops(node: Node, problems: list[Problem], path: tuple[str, ...]) -> Node:
    if path[:2] == ARM_PATH:
        return node
    if node.drop:
        problems.append(Problem("FI113", "There is nothing below this file to drop.", node.where))
        return node
    if isinstance(node.value, tuple):
        return replace(node, value=tuple(_without_drops(item, problems, (*path, "")) for item in node.value))
    kept = {}
    for key, member in node.map.items():
        if member.drop:
            problems.append(Problem("FI113", f"There is no `{key}` below this file to drop.", member.where))
        else:
            kept[key] = _without_drops(member, problems, (*path, key))
    return node.with_map(kept) if isinstance(node.value, dict) else node


def sets_tree(sets: Sequence[str], base: Node) -> tuple[list[Node], list[Problem]]:
    """One overlay a `--set path=value`; the value is read as YAML. Lines of the mark count the options."""
    overlays, problems = [], []
    for line, text in enumerate(sets, 1):
        node, found = _set_tree(text, line, base)
        problems += found
        if node is not None:
            overlays.append(node)
    return overlays, problems


def _set_tree(text: str, line: int, base: Node) -> tuple[Node | None, list[Problem]]:
    path_text, equals, value_text = _split(text)
    mark = Mark(SET, line, 1)
    path = _path(path_text)
    if not equals or not path:
        help = "Write --set stages.verify.with.tokens=3."
        return None, [Problem("FI114", f"`{text}` isn't a path, an equals sign and a value.", mark, help)]
    if path[0] == "vars" and len(path) > 1 and path[1] not in (known := base.map.get("vars", base).map):
        return None, [Problem("FI115", f"The file has no variable `{path[1]}`.", mark, did_you_mean(path[1], known))]
    value, problems = _value(value_text, line, len(text) - len(value_text))
    if value is None:
        return None, problems
    for key in reversed(path):
        value = Node({key: replace(value, key=mark)}, mark)
    return value, problems


def _split(text: str) -> tuple[str, str, str]:
    """At the first equals sign outside of quotes."""
    match = re.match(r'((?:"[^"]*"|[^="])*)(=)(.*)', text, re.DOTALL)
    return (match[1].strip(), match[2], match[3]) if match else (text, "", "")


def _value(text: str, line: int, offset: int) -> tuple[Node | None, list[Problem]]:
    mark = Mark(SET, line, offset + 1)
    if text.strip() in ("", "~", "null"):
        return Node("" if not text.strip() else None, mark), []
    node, problems = read_tree(text, SET)
    moved = [replace(p, mark=mark, notes=()) for p in problems]
    return (_moved(node, mark) if node else None), moved


def _moved(node: Node, mark: Mark) -> Node:
    """The tree with every place set to the option: a value on the command line has one place."""
    if isinstance(node.value, tuple):
        return Node(tuple(_moved(item, mark) for item in node.value), mark, drop=node.drop)
    if isinstance(node.value, dict):
        return Node({key: replace(_moved(item, mark), key=mark) for key, item in node.value.items()}, mark)
    return replace(node, mark=mark, key=None)


def _path(text: str) -> list[str]:
    """Keys of a dotted path. An edge keeps its dots: edges.a.x -> b.y.capacity."""
    if text.startswith("edges.") and '"' not in text:
        edge = text.removeprefix("edges.")
        head, _, last = edge.rpartition(".")
        return ["edges", head.strip(), last] if last in EDGE_FIELDS and "->" in head else ["edges", edge.strip()]
    found = [match[1] if match[1] is not None else match[2] for match in _SEGMENT.finditer(text)]
    return found if all(part.strip() for part in found) and not text.startswith(".") and ".." not in text else []
