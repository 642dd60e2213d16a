"""Holds answers and runs against what a test file expects. Pure: values in, differences as text out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flowinfer.testing.file import Expect


@dataclass(frozen=True)
class Outcome:
    """How a case went, or the run as a whole; `problems` is empty where it passed."""

    name: str
    text: str
    problems: tuple[str, ...]


def answer_problems(expect: Expect | None, status: int | str, body: dict[str, Any]) -> list[str]:
    """What differs in an answer; an error that wasn't expected is the only difference that is told."""
    if expect is None:
        return []
    return _error_problems(expect, status, body) or _answer_problems(expect, status, body)


def text_of(body: dict[str, Any]) -> str:
    """Of an answer, or the message of an error."""
    if "choices" not in body:
        return str(body.get("error", {}).get("message", ""))
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def difference(what: str, found: Any, wanted: Any) -> str:
    """`what is x, expected y`; of long texts or lists that begin alike, also where they part."""
    told = f"{what} is {found!r}, expected {wanted!r}"
    if isinstance(found, (str, list)) and isinstance(wanted, (str, list)) and len(told) > 160:
        pairs = zip(found, wanted, strict=False)
        at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
        return f"{told}\n  they part at {at}: {found[at : at + 20]!r} instead of {wanted[at : at + 20]!r}"
    return told


def _error_problems(expect: Expect, status: int | str, body: dict[str, Any]) -> list[str]:
    if status == (expect.error or 200):
        return []
    return [f"status {status}, expected {expect.error or 200}: {text_of(body)}"]


def _answer_problems(expect: Expect, status: int | str, body: dict[str, Any]) -> list[str]:
    text = text_of(body)
    usage = body.get("usage") or {}
    choice = body["choices"][0] if status == 200 else {}
    found: dict[str, Any] = {
        "text": text,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "param": (body.get("error") or {}).get("param"),
    }
    wanted = {key: getattr(expect, key) for key in found if getattr(expect, key) is not None}
    problems = [difference(key, found[key], value) for key, value in wanted.items() if found[key] != value]
    if expect.contains is not None and expect.contains not in text:
        problems.append(f"{text!r} doesn't contain {expect.contains!r}")
    if expect.matches is not None and not re.search(expect.matches, text):
        problems.append(f"{text!r} doesn't match {expect.matches!r}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if expect.min_cached_tokens is not None and cached < expect.min_cached_tokens:
        problems.append(f"{cached} cached tokens, expected at least {expect.min_cached_tokens}")
    return problems
