"""Fills in "${name}" from vars, after the merge. A value that is nothing but a variable keeps the variable's type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from flowinfer.errors import Problem
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.tree import MAX_DEPTH, Node

_WHOLE = re.compile(r"\$\{([^{}]*)\}")
_PART = re.compile(r"\$\$\{|\$\{([^{}]*)(\}?)")
MAX_LENGTH = 10_000  # variables in variables could double at every level: limits for texts, values, nesting
MAX_VALUES = 5_000
MAX_NESTED = 16


def fill_in(root: Node, problems: list[Problem]) -> Node:
    """The tree with every variable replaced; `$${` stands for a plain `${`."""
    filler = _Filler(root.map["vars"].map if "vars" in root.map else {}, problems)
    members = {key: filler.fill(node) for key, node in root.map.items() if key != "vars"}
    if "vars" in root.map:
        kept = {name: filler.variable(name, node) or node for name, node in root.map["vars"].map.items()}
        members["vars"] = root.map["vars"].with_map(kept) if root.map["vars"].map else root.map["vars"]
    return root.with_map({key: members[key] for key in root.map}) if root.map else root


class _Filler:
    def __init__(self, variables: Mapping[str, Node], problems: list[Problem]) -> None:
        self.variables = variables
        self.problems = problems
        self.done: dict[str, Node | None] = {}
        self.open: list[str] = []

    def fill(self, node: Node) -> Node:
        if isinstance(node.value, dict):
            return node.with_map({key: self.fill(member) for key, member in node.value.items()})
        if isinstance(node.value, tuple):
            return replace(node, value=tuple(self.fill(item) for item in node.value))
        return self.fill_text(node, node.value) if isinstance(node.value, str) and "${" in node.value else node

    def fill_text(self, node: Node, text: str) -> Node:
        whole = _WHOLE.fullmatch(text)
        if whole:
            value = self.variable(whole[1].strip(), node)
            # The variable's value with the place where it is used; `via` says where it was given.
            return _placed(value, node) if value else node
        return replace(node, value=_PART.sub(lambda match: self.part(match, node), text)[:MAX_LENGTH])

    def part(self, match: re.Match[str], node: Node) -> str:
        if match[0] == "$${":
            return "${"
        if not match[2]:
            self.problems.append(Problem("FI116", "`${` without its `}`.", node.mark, "Write $${ for a plain ${."))
            return match[0]
        name = match[1].strip()
        value = self.variable(name, node)
        if value is None:
            return match[0]
        if isinstance(value.value, (dict, tuple)) or value.value is None:
            message = f"`{name}` isn't a single value, so it can't stand inside of a text."
            self.problems.append(Problem("FI116", message, node.mark, f'Use it alone: "${{{name}}}".'))
            return match[0]
        return str(value.value).lower() if isinstance(value.value, bool) else str(value.value)

    def variable(self, name: str, user: Node) -> Node | None:
        """The variable's own value with what it refers to filled in; None after a problem."""
        if name in self.done:
            return self.done[name]
        if name not in self.variables:
            help = did_you_mean(name, self.variables) or "Define it under vars."
            self.problems.append(Problem("FI115", f"There is no variable `{name}`.", user.mark, help))
            return None
        if name in self.open or len(self.open) >= MAX_NESTED:
            chain = " -> ".join([*self.open[self.open.index(name) if name in self.open else 0 :], name])
            self.refuse(name, f"Variables that need each other without end: {chain}.")
            return None
        self.open.append(name)
        value = self.fill(self.variables[name])
        self.open.pop()
        count, depth = _measure(value)
        if count > MAX_VALUES or depth > MAX_DEPTH // 2:
            self.refuse(name, f"The value of `{name}` grows without measure ({count:,} values, {depth} deep).")
            return None
        return self.done.setdefault(name, value)

    def refuse(self, name: str, message: str) -> None:
        if name not in self.done:
            self.problems.append(Problem("FI117", message, self.variables[name].where))
        self.done[name] = None


def _placed(value: Node, user: Node) -> Node:
    return replace(_marked(value, user), key=user.key, via=value.via or value.mark)


def _marked(value: Node, user: Node) -> Node:
    if isinstance(value.value, dict):
        members = {key: replace(_marked(node, user), key=user.mark, via=node.mark) for key, node in value.value.items()}
        return Node(members, user.mark)
    if isinstance(value.value, tuple):
        return Node(tuple(replace(_marked(node, user), via=node.mark) for node in value.value), user.mark)
    return Node(value.value, user.mark)


def _measure(node: Node) -> tuple[int, int]:
    """Number of values and depth. Cheap: what is inside has been measured, so it's bounded."""
    inner = [_measure(child) for child in (node.value if isinstance(node.value, tuple) else node.map.values())]
    return 1 + sum(count for count, _ in inner), 1 + max((depth for _, depth in inner), default=0)
