"""Writes a tree back as YAML, on request with the file and line that each value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from flowinfer.errors import Mark
from flowinfer.spec.merge import SET
from flowinfer.spec.scalars import Scalar, resolve_plain
from flowinfer.spec.tree import Node

_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./ >-]*")  # words that mean the same in every position
HIDDEN = ("extends",)  # done with once everything is merged
COMMENT_COLUMN = 44
Line = tuple[str, str]  # text, comment


def to_yaml(root: Node, *, origin: bool = False) -> str:
    """The tree as YAML that reads back as the same tree. origin: the place of each value as a comment beside it."""
    shown = root.with_map({key: node for key, node in root.map.items() if key not in HIDDEN})
    lines = list(_map(shown, ""))
    if not origin:
        return "".join(f"{text}\n" for text, _ in lines)
    column = min(max([COMMENT_COLUMN, *(len(text) + 2 for text, comment in lines if comment)]), 90)
    return "".join(f"{text.ljust(column)}# {note}\n" if note else f"{text}\n" for text, note in lines)


def _map(node: Node, indent: str) -> Iterator[Line]:
    for key, member in node.map.items():
        yield from _entry(f"{indent}{_key(key)}:", member, indent)


def _entry(head: str, node: Node, indent: str) -> Iterator[Line]:
    if isinstance(node.value, dict) and node.value:
        yield head, ""
        yield from _map(node, indent + "  ")
    elif isinstance(node.value, tuple) and any(isinstance(item.value, (dict, tuple)) for item in node.value):
        yield head, ""
        for item in node.value:
            yield from _item(item, indent + "  ")
    else:
        text = _flow(node)
        yield (f"{head} {text}" if text else head), _origin(node)


def _item(node: Node, indent: str) -> Iterator[Line]:
    """An item of a list; what is deeper is written in one line."""
    yield f"{indent}- {_flow(node) or 'null'}", _origin(node)


def _flow(node: Node) -> str:
    if node.drop:
        return "!drop"
    if isinstance(node.value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_flow(member) or 'null'}" for key, member in node.map.items()) + "}"
    if isinstance(node.value, tuple):
        return "[" + ", ".join(_flow(item) or "null" for item in node.value) + "]"
    return _scalar(node.value)


def _scalar(value: Scalar) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value.replace("${", "$${"))
    return json.dumps(value)


def _key(key: str) -> str:
    return key if _PLAIN.fullmatch(key) and not key.endswith(" ") and not resolve_plain(key)[1] else _quoted(key)


def _text(value: str) -> str:
    plain, trap = resolve_plain(value)
    safe = _PLAIN.fullmatch(value) and isinstance(plain, str) and not trap and not value.endswith(" ")
    return value if safe else _quoted(value)


def _quoted(text: str) -> str:
    """In double quotes, with YAML's escapes for what doesn't print (JSON's surrogate pairs aren't YAML)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _origin(node: Node) -> str:
    return _place(node.mark) + (f", from {_place(node.via)}" if node.via else "")


def _place(mark: Mark) -> str:
    return SET if mark.file == SET else f"{mark.file}:{mark.line}"
