"""Takes a model's answer apart: reasoning, text, tool calls. Knows nothing of tokens, stops or protocols.

The formats are data (formats.py); parser.py reads all that mark their calls by brackets, harmony.py gpt-oss's channels.
"""

from __future__ import annotations

from flowinfer.message import ReplyFormat
from flowinfer.text.reply.delta import Delta, ReplyParser
from flowinfer.text.reply.formats import HARMONY, THINK_CLOSE, THINK_OPEN, TOOL_FORMATS
from flowinfer.text.reply.harmony import MARKERS, Harmony
from flowinfer.text.reply.parser import Parser

__all__ = ["Delta", "ReplyParser", "markers_of", "open_parser"]


def open_parser(form: ReplyFormat, *, call_prefix: str) -> ReplyParser:
    """A parser for one answer. call_prefix makes the ids of its calls unique. Raises KeyError for unknown names."""
    delta = Delta(call_prefix, short_ids=form.tools.startswith("mistral"))
    if HARMONY in (form.tools, form.reasoning):
        return Harmony(delta)
    tools = TOOL_FORMATS[form.tools] if form.tools else None
    return Parser(tools, delta, reasoning=bool(form.reasoning), thinking=form.thinking, strings=form.strings)


def markers_of(form: ReplyFormat) -> frozenset[str]:
    """The strings by which an answer is taken apart; a special token that is one, or part of one, has to be shown."""
    if HARMONY in (form.tools, form.reasoning):
        return frozenset(MARKERS)
    tools = TOOL_FORMATS[form.tools].markers if form.tools else ()
    return frozenset((*tools, *((THINK_OPEN, THINK_CLOSE) if form.reasoning else ())))
