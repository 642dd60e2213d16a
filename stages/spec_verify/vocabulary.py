"""Whether two models mean the same by their token ids, by the small files of their folders. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowinfer.engine import hub
from flowinfer.errors import ModelError


def misfit(draft_model: str, model: str) -> tuple[str, str] | None:
    """Why one can't draft for the other, and what would do; None if it can, or if either isn't here to be compared.

    Ids are compared token by token where both have a tokenizer.json, and by their number in any case.
    """
    try:
        draft, target = hub.resolve(draft_model), hub.resolve(model)
        sizes = [hub.describe(folder).config.vocab_size for folder in (draft, target)]
    except ModelError:
        return None  # is told, or fetched, elsewhere, and compared then
    found = _difference(_tokens(draft), _tokens(target))
    if found is None and sizes[0] != sizes[1]:
        found = f"knows {sizes[0]} tokens and {model} {sizes[1]}"
    if found is None:
        return None
    text = f"draft_model: {draft_model} {found}: its drafts would mean other tokens."
    return text, "Use a smaller model with the same tokenizer, or draft: suffix."


def _difference(draft: dict[int, str], target: dict[int, str]) -> str | None:
    if not draft or not target:
        return None
    other = next((id for id in sorted(draft.keys() | target.keys()) if draft.get(id) != target.get(id)), None)
    if other is None:
        return None
    ours, theirs = (repr(tokens[other]) if other in tokens else "no token" for tokens in (draft, target))
    return f"has {ours} where the model has {theirs} (id {other})"


def _tokens(folder: Path) -> dict[int, str]:
    """Tokens by id, of the tokenizer's file; empty where there is none that can be read."""
    try:
        file: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary: dict[str, int] = file["model"]["vocab"]
        added = {entry["id"]: entry["content"] for entry in file.get("added_tokens", ())}
        return {id: token for token, id in vocabulary.items()} | added
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
