"""Parts a message of many requests in two: what belongs to requests of a set, and the rest. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from flowinfer.message import Message, Text, Tokens

Parts = tuple[Message | None, Message | None]  # of the set, of the others


def split(message: Any, requests: Collection[str]) -> Parts:
    """A message as its part about `requests` and its part about others; None for an empty part.

    What names no request belongs to the others.
    """
    if isinstance(message, Tokens):
        return _split_tokens(message, requests)
    if isinstance(message, Text):
        return _split_text(message, requests)
    return (message, None) if getattr(message, "id", None) in requests else (None, message)


def _split_text(text: Text, requests: Collection[str]) -> Parts:
    mine = [piece for piece in text.pieces if piece.id in requests]
    if not mine:
        return None, text
    rest = [piece for piece in text.pieces if piece.id not in requests]
    return (Text(step=text.step, pieces=mine), Text(step=text.step, pieces=rest)) if rest else (text, None)


def _split_tokens(tokens: Tokens, requests: Collection[str]) -> Parts:
    belongs = [request in requests for request in tokens.ids]
    if not any(belongs):
        return None, tokens
    if all(belongs):
        return tokens, None
    return _rows(tokens, belongs), _rows(tokens, [not mine for mine in belongs])


def _rows(tokens: Tokens, kept: list[bool]) -> Tokens:
    """These rows of a step, numbered anew."""
    mask = np.array(kept, np.bool_)
    place = {old: new for new, old in enumerate(np.flatnonzero(mask).tolist())}
    ids = [request for request, keep in zip(tokens.ids, kept, strict=True) if keep]
    return Tokens(
        step=tokens.step,
        ids=ids,
        counts=tokens.counts[mask],
        tokens=tokens.tokens[np.repeat(mask, tokens.counts)],
        opened=[opening for opening in tokens.opened if opening.id in ids],
        finished={place[row]: finish for row, finish in tokens.finished.items() if row in place},
        logprobs={place[row]: entries for row, entries in tokens.logprobs.items() if row in place},
        positions=None if tokens.positions is None else tokens.positions[mask],
    )
