"""A JSON object that is also its text, for chat templates that don't agree on what tool arguments are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowinfer.text.traced import join_traced


class JsonObject(dict[str, Any]):
    """Tool arguments: some templates dump them as an object, others join them to text. `text` is the JSON itself."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return join_traced((self._text, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return join_traced((other, self._text)) if isinstance(other, str) else NotImplemented
