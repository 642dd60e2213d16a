"""What a grammar engine must offer. Knows nothing of requests, batches or drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flowinfer.errors import RequestError
from flowinfer.message import Grammar

Bits = NDArray[np.uint8]  # a set of token ids, eight a byte, the lowest id in the lowest bit


class Matcher(Protocol):
    """Where one sequence stands in its grammar."""

    def allowed(self) -> Bits:
        """The tokens that may come next, uint8 [ceil(vocab / 32) * 4]; ends of text where the grammar may end."""

    def advance(self, token: int) -> bool:
        """Takes a token. False, and nothing changed, where the grammar doesn't allow it."""

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could be taken one after the other. Changes nothing."""

    @property
    def error(self) -> str:
        """Why the matcher can't go on (a limit was met, say); empty while it can."""


class CompiledGrammar(Protocol):
    """A grammar made ready for one vocabulary."""

    def start(self) -> Matcher:
        """A matcher at the beginning of the grammar."""


class GrammarEngine(Protocol):
    """Compiles grammars for one vocabulary. May be called by several threads at once.

    Grammars of calls (calls.py) are Lark in llguidance's dialect: `%json {…}` for a schema, `<[7]>` for a token by its
    id, `[lazy]` for the shortest match, `&` and `~` between regular expressions, @body for a nested grammar.
    """

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises RequestError 400 naming the field for a grammar that is wrong, impossible or uses what isn't known."""


def grammar_error(grammar: Grammar, reason: str) -> RequestError:
    """The refusal of a grammar, naming the field that it came in."""
    text = " ".join(reason.split())
    if len(text) > 300:
        text = text[:300] + "..."
    return RequestError(400, f"{grammar.param}: {text}", code="invalid_grammar", param=grammar.param)
