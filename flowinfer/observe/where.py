"""Small expressions over a message's fields, as in `request == 'x' and num_tokens > 100`. Never evaluates Python.

The text is parsed by Python's own parser; a closed list of node types becomes closures, anything else is refused with
its place. Attributes are read only from message structs, and only their declared fields: there are no calls but `len`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.message import Message
from flowinfer.spec.hints import did_you_mean

Value = Callable[[Any], Any]  # of a message

MAX_CHARS = 1_000
MAX_DEPTH = 20
DERIVED = ("request", "num_tokens", "type")  # names that every message has beside its fields
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


class Requests(tuple[str, ...]):
    """The requests that a message speaks of. Equal to an id when it is one of them."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return other in tuple(self) if isinstance(other, str) else tuple(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def requests_of(message: Any) -> Requests:
    """Ids of the requests of a message: its own, those of a batch, those of its pieces."""
    if hasattr(message, "id"):
        return Requests((message.id,))
    if hasattr(message, "ids"):
        return Requests(message.ids)
    return Requests(piece.id for piece in getattr(message, "pieces", ()))


def num_tokens(message: Any) -> int:
    """Tokens that a message carries; 0 where its type has none."""
    found = getattr(message, "tokens", None)
    return sum(len(piece.tokens) for piece in getattr(message, "pieces", ())) if found is None else len(found)


def compile_where(text: str, kind: type[Message] | None = None) -> Callable[[Message], bool]:
    """A test of messages of `kind` (any, without). Raises FlowInferError that names what isn't understood, and where.

    The test itself never raises: what can't be compared (a field that is None, say) doesn't match.
    """
    if not text.strip():
        return lambda message: True
    if len(text) > MAX_CHARS:
        raise FlowInferError(f"--where is longer than {MAX_CHARS} characters.")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        offset = getattr(error, "offset", None) or len(text.strip()) + 1
        raise FlowInferError(f"--where can't be read at character {offset}: {text!r}.", help=_HELP) from error
    value = _Compiler(text.strip(), kind).value(tree.body, 0)

    def holds(message: Message) -> bool:
        try:
            return bool(value(message))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError):
            return False

    return holds


_HELP = "As in: request == 'x' and num_tokens > 100."


class _Compiler:
    def __init__(self, text: str, kind: type[Message] | None) -> None:
        self.text, self.kind = text, kind

    def value(self, node: ast.expr, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise FlowInferError(f"--where is nested deeper than {MAX_DEPTH} levels.")
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None as constant):
                return lambda message: constant
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.field(node, depth)
            case ast.BoolOp(op=op, values=values):
                parts = [self.value(part, depth + 1) for part in values]
                if isinstance(op, ast.And):
                    return lambda message: all(_soft(part, message) for part in parts)
                return lambda message: any(_soft(part, message) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.value(operand, depth + 1)
                return lambda message: not inner(message)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.value(operand, depth + 1)
                return lambda message: -number(message)
            case ast.BinOp(left=left, op=arithmetic, right=right) if type(arithmetic) in _ARITHMETIC:
                return self.arithmetic(_ARITHMETIC[type(arithmetic)], left, right, depth)
            case ast.Compare():
                return self.comparison(node, depth)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                items = [self.value(element, depth + 1) for element in elements]
                return lambda message: [item(message) for item in items]
            case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
                sized = self.value(argument, depth + 1)
                return lambda message: len(sized(message))
        raise self.refusal(node, "isn't something that --where knows")

    def name(self, node: ast.Name) -> Value:
        if node.id == "request":
            return requests_of
        if node.id == "num_tokens":
            return num_tokens
        if node.id == "type":
            return lambda message: type(message).__name__
        if self.kind is not None and node.id not in self.kind.__struct_fields__:
            known = [*DERIVED, *self.kind.__struct_fields__]
            raise self.refusal(node, f"is no field of {self.kind.__name__}", did_you_mean(node.id, known))
        name = node.id
        return lambda message: _read(message, name)

    def field(self, node: ast.Attribute, depth: int) -> Value:
        inner, name = self.value(node.value, depth + 1), node.attr
        return lambda message: _read(inner(message), name)

    def arithmetic(self, apply: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr, depth: int) -> Value:
        a, b = self.value(left, depth + 1), self.value(right, depth + 1)
        return lambda message: apply(_number(a(message)), _number(b(message)))

    def comparison(self, node: ast.Compare, depth: int) -> Value:
        values = [self.value(part, depth + 1) for part in (node.left, *node.comparators)]
        tests = [_comparison(op) for op in node.ops]
        if None in tests:
            raise self.refusal(node, "compares in a way that --where doesn't know")

        def holds(message: Any) -> bool:
            found = [value(message) for value in values]
            return all(test(a, b) for test, a, b in zip(tests, found, found[1:], strict=False))  # type: ignore[misc]

        return holds

    def refusal(self, node: ast.expr, what: str, help: str = "") -> FlowInferError:
        start = len(self.text.encode()[: node.col_offset].decode(errors="replace"))
        part = ast.get_source_segment(self.text, node) or self.text
        return FlowInferError(f"--where, character {start + 1}: {part!r} {what}.", help=help or _HELP)


def _comparison(op: ast.cmpop) -> Callable[[Any, Any], bool] | None:
    match op:
        case ast.Eq() | ast.Is():
            return lambda a, b: bool(a == b)
        case ast.NotEq() | ast.IsNot():
            return lambda a, b: bool(a != b)
        case ast.In():
            return _is_in
        case ast.NotIn():
            return lambda a, b: not _is_in(a, b)
    return _COMPARE.get(type(op))


def _is_in(a: Any, b: Any) -> bool:
    if isinstance(a, Requests):
        return any(one in b for one in a)
    return bool(a in b)


def _read(value: Any, name: str) -> Any:
    """A declared field of a struct; nothing else is ever read."""
    if isinstance(value, msgspec.Struct) and name in value.__struct_fields__:
        return getattr(value, name)
    if isinstance(value, dict):
        return value.get(name)
    return None


def _number(value: Any) -> Any:
    """Text isn't multiplied: a short expression must not make a long value."""
    if isinstance(value, (str, bytes, Sequence)):
        raise TypeError("not a number")
    return value


def _soft(part: Value, message: Any) -> bool:
    """A part of and/or that can't be compared doesn't hold; the others may."""
    try:
        return bool(part(message))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError):
        return False
