"""Finds the word that was meant. Says nothing where no word is close."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to `word`, if one is near enough to be meant."""
    folded = {name.lower().replace("_", "-"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("_", "-"), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`Did you mean x?`, or the known words where there are few, or nothing."""
    names = list(known)
    near = closest(word, names)
    if near:
        return f"Did you mean `{near}`?"
    return f"Known: {', '.join(sorted(names))}." if 0 < len(names) <= 12 else ""
