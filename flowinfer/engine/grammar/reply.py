"""The grammar of a whole answer: reasoning, then calls, or the form that the client asks for. Knows no vocabulary.

Where reasoning ends with one token the grammar just waits for it (after.py), which costs nothing while the model
thinks; elsewhere, and for gpt-oss's channels, reasoning is part of the grammar.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from flowinfer.engine.grammar import calls
from flowinfer.engine.grammar.guidance import accepts, check
from flowinfer.engine.grammar.lark import ANY, Lark, Mark, any_of
from flowinfer.message import Grammar, ReplyFormat, ToolChoice
from flowinfer.text.reply.formats import HARMONY, THINK_CLOSE, THINK_OPEN, TOOL_FORMATS

_BODY = "@body"  # the client's own grammar, as one that is nested
_NEXT = "<|end|><|start|>assistant"
_MAX_KEPT_BYTES = 64 * 1024  # of a request's tools and form: all that is kept stays below 10 MB or so
_HARMONY_CALL = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


class Wanted(NamedTuple):
    """What a request says about its answer: the form of its text, and the calls that it may or must hold."""

    grammar: Grammar | None
    tools: Sequence[calls.Tool]
    choice: ToolChoice


def answer_grammar(form: ReplyFormat | None, wanted: Wanted, mark: Mark) -> Grammar | None:
    """One grammar for all that is wanted, None if nothing binds the answer. Raises RequestError (400).

    form: how the model writes, None where all of the answer is text.  mark: a literal as the model's control ids and
    the text between them.
    """
    bound = bool(wanted.tools) and calls.is_bound(wanted.tools, wanted.choice)
    if wanted.grammar is None and not bound:
        return None
    if form is None:
        return wanted.grammar
    tools = wanted.tools if form.tools else ()
    lark = Lark(mark)
    if HARMONY in (form.tools, form.reasoning):
        start = _channels(lark, wanted, tools)
        return _made(lark, start, wanted)
    switch, reasons = _switch(form, mark), bool(form.reasoning) and not form.thought
    if not tools and (switch is not None or not reasons):
        return None if wanted.grammar is None else _behind(wanted.grammar, switch)
    start = _calls(lark, form, wanted) if tools else _BODY
    if switch is None and reasons:
        return _made(lark, f"{_thought(lark, form)} {start}", wanted)
    return _behind(_made(lark, start, wanted), switch)


class AnswerGrammars:
    """The grammars of one model's answers, checked; those asked for last are kept, as every turn of an agent brings the
    same tools: 20 strict ones take 6 to 8 ms, found again 0.05. May be used by several threads at once."""

    def __init__(self, mark: Mark, capacity: int = 64) -> None:
        self._mark, self._capacity = mark, capacity
        self._kept: OrderedDict[bytes, Grammar | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, form: ReplyFormat | None, wanted: Wanted) -> Grammar | None:
        """As `answer_grammar`, and checked. Raises RequestError (400)."""
        key = msgspec.json.encode([form, *wanted])
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if wanted.grammar is not None:
            check(wanted.grammar)  # by itself, so that its own mistakes are told
        grammar = answer_grammar(form, wanted, self._mark)
        if grammar is not None and grammar.text != (wanted.grammar and wanted.grammar.text):
            check(grammar)
        if len(key) > _MAX_KEPT_BYTES:
            return grammar
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return grammar


class _Switch(NamedTuple):
    """The tokens around reasoning; opens is None where the prompt has opened it."""

    opens: int | None
    closes: int


def _switch(form: ReplyFormat, mark: Mark) -> _Switch | None:
    """How reasoning is told apart by tokens; None where it can't be."""
    opens, closes = (mark(text) for text in (THINK_OPEN, THINK_CLOSE))
    if not form.reasoning or form.thought or len(closes) != 1 or not isinstance(closes[0], int):
        return None
    if form.thinking:
        return _Switch(None, closes[0])
    return _Switch(opens[0], closes[0]) if len(opens) == 1 and isinstance(opens[0], int) else None


def _behind(grammar: Grammar, switch: _Switch | None) -> Grammar:
    if switch is None:
        return grammar
    return msgspec.structs.replace(grammar, opens=switch.opens, after=switch.closes)


def _thought(lark: Lark, form: ReplyFormat) -> str:
    thought = lark.until(ANY, THINK_CLOSE)
    return thought if form.thinking else f"({lark.literal(THINK_OPEN)} {thought})?"


def _calls(lark: Lark, form: ReplyFormat, wanted: Wanted) -> str:
    body = None if wanted.grammar is None else _BODY
    tools = TOOL_FORMATS[form.tools]
    return calls.answer(lark, tools, wanted.tools, wanted.choice, accepts=accepts, body=body)


def _channels(lark: Lark, wanted: Wanted, tools: Sequence[calls.Tool]) -> str:
    """gpt-oss: analysis, then a call or, if none must be, the final text."""
    choice = wanted.choice
    before = [lark.literal("<|channel|>analysis<|message|>")]
    last = []
    if tools:
        if not choice.required:  # tells the user what it is about to do
            before.append(lark.literal("<|channel|>commentary<|message|>"))
        last = [
            calls.call_of(lark, _HARMONY_CALL, tool, place, choice, accepts)
            for place, tool in calls.chosen(tools, choice)
        ]
    if not (tools and choice.required):
        body = lark.free() if wanted.grammar is None else _BODY
        last.append(f"{lark.literal('<|channel|>final<|message|>')} {body}")
    return f"({any_of(before)} {lark.until(ANY, _NEXT)})* {any_of(last)}"


def _made(lark: Lark, start: str, wanted: Wanted) -> Grammar:
    """The grammar with the client's own nested in it, where it is."""
    text = lark.text(start)
    param = "tool_choice" if wanted.grammar is None else wanted.grammar.param
    if _BODY not in start:
        return Grammar("lark", text, param)
    assert wanted.grammar is not None, "only a given form is a body"
    return Grammar("nested", json.dumps([text, wanted.grammar.kind, wanted.grammar.text]), param)
