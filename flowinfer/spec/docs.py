"""What the author wrote about each setting: the text below a field, the comment beside it, or its Field description."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from pydantic import BaseModel

_HEAD = re.compile(r"(?:^|\s\s|\n)(\w+(?:, \w+)*): ")
_COMMENT = re.compile(r"#\s*(?!noqa|type:|pragma)(.+?)\s*(?:#\s*(?:noqa|type:).*)?$")


def attribute_docs(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> its description, for fields that have one. Reads source code: for help texts, not for checks."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _from_source(cls)
    found |= _from_docstring(model)
    described = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {**{name: text for name, text in found.items() if name in model.model_fields}, **described}


def _from_source(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        (body,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    lines, docs = source.split("\n"), {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for index, statement in enumerate(statements):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after = statements[index + 1] if index + 1 < len(statements) else None
            text = _docstring(after) or _comment(lines, statement)
            if text:
                docs[statement.target.id] = text
    return docs


def _from_docstring(model: type[BaseModel]) -> dict[str, str]:
    """From `name: what it means.  other, third: ...` in the docstring of the settings."""
    text = inspect.cleandoc(model.__dict__.get("__doc__") or "")
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    found: dict[str, str] = {}
    for head, end in zip(heads, ends, strict=False):
        meaning = " ".join(text[head.end() : end].split()).rstrip(".")
        found |= dict.fromkeys(head[1].split(", "), meaning)
    return found


def _docstring(statement: ast.stmt | None) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return inspect.cleandoc(value.value) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _comment(lines: list[str], statement: ast.AnnAssign) -> str:
    end = statement.end_lineno or statement.lineno
    rest = lines[end - 1].encode()[statement.end_col_offset or 0 :].decode(errors="replace").strip()
    match = _COMMENT.match(rest)
    return match[1].strip() if match else ""
