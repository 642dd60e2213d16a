"""Reads YAML into a tree in which every value knows its place. Knows nothing of pipelines, overlays or stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from flowinfer.errors import Mark, Problem
from flowinfer.spec.scalars import Scalar, resolve_plain

# libyaml is ten times faster than the Python parser and gives the same events.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_DEPTH = 32  # deeper than any pipeline; keeps every later walk far from Python's recursion limit


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file. key: where its key stands, in a map; via: the variable that it came from; drop: `!drop`."""

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    mark: Mark
    key: Mark | None = None
    via: Mark | None = None
    drop: bool = False

    @property
    def map(self) -> dict[str, Node]:
        """The members of a map; of anything else, none."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def where(self) -> Mark:
        """The key's place, or the value's where there is no key."""
        return self.key or self.mark

    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, tuple) else self.value

    def at(self, *path: str | int) -> Node | None:
        """The node at this path, None where there is none."""
        node: Node | None = self
        for step in path:
            node = node.child(step) if node else None
        return node

    def child(self, step: str | int) -> Node | None:
        """The member or item of this name or index."""
        if isinstance(self.value, dict):
            return self.value.get(str(step))
        if isinstance(self.value, tuple) and isinstance(step, int) and 0 <= step < len(self.value):
            return self.value[step]
        return None

    def with_map(self, members: dict[str, Node]) -> Node:
        """The same node with other members."""
        return replace(self, value=members)


@dataclass(slots=True)
class _Frame:
    """A map or list that is being read."""

    mark: Mark
    is_map: bool
    members: dict[str, Node] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    key: str | None = None
    key_mark: Mark | None = None

    def node(self) -> Node:
        return Node(self.members if self.is_map else tuple(self.items), self.mark)


class _Reader:
    """Builds the tree from parser events, with a stack of its own, so that no nesting can exhaust Python's."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.frames: list[_Frame] = []
        self.root: Node | None = None
        self.num_documents = 0

    def mark(self, event: Any) -> Mark:
        return Mark(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def problem(
        self, code: str, message: str, mark: Mark, help: str = "", note: tuple[Mark, str] | None = None
    ) -> None:
        self.problems.append(Problem(code, message, mark, help, (note,) if note else ()))

    def take(self, event: Any) -> bool:
        """Takes one event; False when reading can't go on."""
        match type(event).__name__:
            case "DocumentStartEvent":
                return self.start_document(event)
            case "MappingStartEvent" | "SequenceStartEvent":
                return self.open(event)
            case "MappingEndEvent" | "SequenceEndEvent":
                self.place(self.frames.pop().node())
            case "ScalarEvent":
                self.check_extras(event)
                self.scalar(event)
            case "AliasEvent":
                self.refuse_alias(event)
                self.place(Node(None, self.mark(event)))
        return True

    def start_document(self, event: Any) -> bool:
        self.num_documents += 1
        if self.num_documents > 1:
            self.problem("FI110", "The file holds more than one document.", self.mark(event), "One service a file.")
        return self.num_documents == 1

    def open(self, event: Any) -> bool:
        mark = self.mark(event)
        self.check_extras(event)
        frame = self.frames[-1] if self.frames else None
        if frame and frame.is_map and frame.key is None:
            self.problem("FI109", "A key must be a word, not a list or a map.", mark)
            return False
        if len(self.frames) >= MAX_DEPTH:
            self.problem("FI111", f"Nested deeper than {MAX_DEPTH} levels.", mark)
            return False
        self.frames.append(_Frame(mark, is_map=isinstance(event, yaml.MappingStartEvent)))
        return True

    def scalar(self, event: Any) -> None:
        mark, frame = self.mark(event), self.frames[-1] if self.frames else None
        value: Scalar = event.value
        if event.implicit[0]:
            value, trap = resolve_plain(event.value)
            if trap:
                self.problem(trap.code, trap.message, mark, trap.help)
        if frame and frame.is_map and frame.key is None:
            if event.implicit[0] and event.value == "<<":
                self.problem("FI107", "Merge keys (<<) aren't supported.", mark, "Use vars, or a file with extends.")
            self.take_key(frame, event.value, mark)
        else:
            drop = event.tag == "!drop" and not event.value
            self.place(Node(None if drop else value, mark, drop=drop))

    def take_key(self, frame: _Frame, key: str, mark: Mark) -> None:
        frame.key, frame.key_mark = key, mark
        if key in frame.members:
            first = frame.members[key].where
            self.problem(
                "FI103", f"`{key}` is here twice.", mark, "Remove one of them.", (first, "the first one is here")
            )

    def place(self, node: Node) -> None:
        if not self.frames:
            self.root = node
            return
        frame = self.frames[-1]
        if frame.is_map and frame.key is not None:
            frame.members.setdefault(frame.key, replace(node, key=frame.key_mark))
            frame.key = None
        elif frame.is_map:
            self.take_key(frame, "", node.mark)
        else:
            frame.items.append(node)

    def refuse_alias(self, event: Any) -> None:
        text = "Anchors and aliases aren't supported."
        self.problem("FI107", text, self.mark(event), 'Name the value under vars and write "${name}" where it is used.')

    def check_extras(self, event: Any) -> None:
        if event.anchor:
            self.refuse_alias(event)
        if event.tag not in (None, "!", "!drop"):
            self.problem(
                "FI108", f"The tag {event.tag} means nothing here.", self.mark(event), "The only one is !drop."
            )
        elif event.tag == "!drop" and getattr(event, "value", "x") != "":
            self.problem("FI108", "!drop stands alone, without a value.", self.mark(event), "Write `key: !drop`.")


def read_tree(text: str, file: str) -> tuple[Node | None, list[Problem]]:
    """The tree of `text` with every mistake of syntax; None when nothing can be made of it."""
    reader = _Reader(file)
    try:
        for event in _events(text):
            if not reader.take(event):
                return None, reader.problems
    except yaml.YAMLError as error:
        return None, [*reader.problems, _syntax_problem(error, text, file)]
    if reader.root is None or reader.root.value is None:
        reader.problem("FI110", "The file is empty.", Mark(file, 1, 1), "Start from pipelines/quickstart.yaml.")
        return None, reader.problems
    return reader.root, reader.problems


def _events(text: str) -> Iterator[Any]:
    yield from yaml.parse(text, Loader=_LOADER)


def _syntax_problem(error: yaml.YAMLError, text: str, file: str) -> Problem:
    where = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    lines = text.split("\n")
    position = min(getattr(error, "position", 0) or 0, len(text))
    line = where.line if where else text.count("\n", 0, position)
    column = where.column if where else position - (text.rfind("\n", 0, position) + 1)
    line = min(line, len(lines) - 1)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read"
    context = getattr(error, "context", None)
    message = f"Not valid YAML: {what}" + (f" {context}" if context else "") + "."
    return Problem("FI102", message, Mark(file, line + 1, column + 1), _syntax_help(lines, line))


def _syntax_help(lines: list[str], line: int) -> str:
    near = "\n".join(lines[max(0, line - 1) : line + 1])
    if "${" in near:
        return 'Inside { } a variable needs quotes: model: "${model}".'
    if "!drop" in near:
        return "Leave a space behind !drop inside of { }, or give it a line of its own."
    if "\t" in near:
        return "Indent with spaces: YAML has no tabs."
    if any(": " in part.split(": ", 1)[-1] for part in near.split("\n") if ": " in part):
        return "Put quotes around a text that holds a colon, and check the indentation."
    return "Check the indentation, and that every bracket and quote is closed."


def to_json(node: Node) -> str:
    """The value as JSON text, for strict validation in JSON mode (lists become tuples, text becomes paths)."""
    return json.dumps(node.plain(), ensure_ascii=False)
