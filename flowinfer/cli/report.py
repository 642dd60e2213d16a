"""Draws the problems of a pipeline file as a compiler does: code, place, line with a caret, notes, one suggestion."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click

from flowinfer.errors import Mark, Problem

_TOKEN = re.compile(r'"[^"]*"?|\'[^\']*\'?|!?[^\s,:{}\[\]#]+|.')
_EDGE = re.compile(r"\"?[a-z][\w.-]*\s*->\s*[a-z][\w.-]*\"?")


def render(problems: Sequence[Problem], sources: Mapping[str, str], *, color: bool = False, width: int = 0) -> str:
    """All problems as text, with a line that counts them. width: columns, 0 for the terminal's."""
    printer = _Printer(sources, color, width or min(shutil.get_terminal_size().columns, 120))
    blocks = [printer.problem(problem) for problem in problems]
    return "\n\n".join([*blocks, _count(problems)])


def wants_color(stream: TextIO) -> bool:
    """True for a terminal, unless NO_COLOR says otherwise (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _count(problems: Sequence[Problem]) -> str:
    errors = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    return (
        f"{errors}. For more about {'it' if len(problems) == 1 else 'the first'}: flowinfer explain {problems[0].code}"
    )


class _Printer:
    def __init__(self, sources: Mapping[str, str], color: bool, width: int) -> None:
        self.lines = {file: text.split("\n") for file, text in sources.items()}
        self.color = color
        self.width = width

    def style(self, text: str, **how: object) -> str:
        return click.style(text, **how) if self.color else text  # type: ignore[arg-type]

    def problem(self, problem: Problem) -> str:
        head = self.style(f"error {problem.code}", fg="red", bold=True)
        message = self.fill(problem.message, indent=len(f"error {problem.code}: "), bold=True)
        parts = [f"{head}: {message}"]
        if problem.mark:
            parts += self.excerpt(problem.mark, "-->", "^")
        for mark, text in problem.notes:
            parts += self.note(mark, text)
        if problem.help:
            parts.append(f" {self.style('help', fg='cyan', bold=True)}: {self.fill(problem.help, indent=7)}")
        return "\n".join(parts)

    def fill(self, text: str, indent: int, bold: bool = False) -> str:
        lines = textwrap.wrap(text, self.width - indent, break_long_words=False, break_on_hyphens=False) or [""]
        return ("\n" + " " * indent).join(self.style(line, bold=True) if bold else line for line in lines)

    def note(self, mark: Mark | None, text: str) -> list[str]:
        head = f" {self.style('note', fg='green', bold=True)}: {self.fill(text, indent=7)}"
        return [head, *(self.excerpt(mark, "-->", "-") if mark else [])]

    def excerpt(self, mark: Mark, arrow: str, sign: str) -> list[str]:
        """The place, and the line with a caret below the word, cut to the width of the terminal."""
        where = f"{mark.file}, option {mark.line}" if mark.file == "--set" else mark
        place = f"{self.style(arrow, fg='blue', bold=True)} {where}"
        text = self.line(mark)
        if text is None:
            return [f"   {place}"]
        gutter = len(str(mark.line))
        bar = self.style("|", fg="blue", bold=True)
        text, column = _window(text, mark.column - 1, self.width - gutter - 4)
        under = " " * column + sign * _span(text, column)
        caret = self.style(under, fg="red" if sign == "^" else "green", bold=True)
        number = self.style(str(mark.line), fg="blue", bold=True)
        return [f"{' ' * gutter} {place}", f"{number} {bar} {text}", f"{' ' * gutter} {bar} {caret}"]

    def line(self, mark: Mark) -> str | None:
        if mark.file not in self.lines:
            try:
                self.lines[mark.file] = Path(mark.file).read_text("utf-8-sig").split("\n")
            except (OSError, ValueError):
                self.lines[mark.file] = []
        lines = self.lines[mark.file]
        return _visible(lines[mark.line - 1]) if 0 < mark.line <= len(lines) and lines[mark.line - 1].strip() else None


def _visible(text: str) -> str:
    """One column a character, and nothing that would move the cursor."""
    return "".join(char if char.isprintable() else " " if char in "\t\r" else "?" for char in text).rstrip()


def _span(text: str, column: int) -> int:
    match = _EDGE.match(text, column) or _TOKEN.match(text, column)
    return max(1, len(match[0].rstrip())) if match else 1


def _window(text: str, column: int, width: int) -> tuple[str, int]:
    """The part of a long line around the column."""
    width = max(width, 20)
    if len(text) <= width:
        return text, column
    fits = column + min(_span(text, column), 12) < width - 1
    start = 0 if fits else max(0, min(column - width // 3, len(text) - width + 1))
    cut = text[start : start + width - 1]
    text = ("…" + cut[1:] if start else cut) + ("…" if start + width - 1 < len(text) else "")
    return text, column - start
