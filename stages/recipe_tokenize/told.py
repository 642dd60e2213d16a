"""Chooses how a model is told chats: by a template, its own or a given one, or by its makers' package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flowinfer.errors import ModelError

if TYPE_CHECKING:
    from flowinfer.text.tokenizer import TextTokenizer

# auto: the model's template; for a DeepSeek V4 that brings none, its recipe.
Recipe = Literal["auto", "template", "deepseek-v4", "deepseek-v4.1"]


def told_by(tokenizer: TextTokenizer, template: str | None, recipe: Recipe) -> TextTokenizer:
    """The tokenizer with the wanted format of chats. Raises ModelError for a template that can't be read."""
    if template:
        return tokenizer.with_template(_read(template))
    if recipe in ("deepseek-v4", "deepseek-v4.1"):
        return tokenizer.with_recipe(recipe)
    if recipe == "auto" and tokenizer.recipe and not tokenizer.templates:
        return tokenizer.with_recipe(tokenizer.recipe)
    return tokenizer


def _read(template: str) -> str:
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"The chat template {template!r} can't be read: {error.strerror}.") from error
