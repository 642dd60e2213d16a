"""`flowinfer explain`: what a code means, why it's refused, a wrong and a right example."""

from __future__ import annotations

import textwrap
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml

from flowinfer.errors import FlowInferError

GROUPS = {
    "1": "Reading the file",
    "2": "Structure and settings",
    "3": "The graph",
    "4": "Workers and network",
    "5": "Tests",
}


class Entry(NamedTuple):
    """What is known about one code."""

    title: str
    why: str
    wrong: str
    right: str


@cache
def entries() -> dict[str, Entry]:
    """All codes with their entries."""
    text = files("flowinfer.spec").joinpath("codes.yaml").read_text("utf-8")
    return {code: Entry(**entry) for code, entry in yaml.safe_load(text).items()}


def explain_code(code: str) -> str:
    """The entry of a code as text. Raises FlowInferError for a code that doesn't exist."""
    entry = entries().get(code.upper())
    if entry is None:
        raise FlowInferError(f"There is no error {code}.", help="`flowinfer explain` lists all.")
    why = textwrap.fill(" ".join(entry.why.split()), 80)
    wrong, right = (textwrap.indent(text.rstrip(), "    ") for text in (entry.wrong, entry.right))
    return f"{code.upper()}: {entry.title}\n\n{why}\n\nWrong:\n\n{wrong}\n\nRight:\n\n{right}\n"


def list_codes() -> str:
    """All codes with their titles, by group."""
    lines = []
    for digit, title in GROUPS.items():
        lines.append(f"{title}\n")
        lines += [f"  {code}  {entry.title}\n" for code, entry in entries().items() if code[2] == digit]
        lines.append("\n")
    return "".join(lines[:-1])
