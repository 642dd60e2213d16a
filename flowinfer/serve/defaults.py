"""How requests that don't say are sampled: by the file's `serve.sampling`, else by the model's generation_config."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowinfer.errors import FlowInferError

log = logging.getLogger("flowinfer.serve")

Values = Mapping[str, float]
# Fields of generation_config.json by the name that requests have for them, with the range in which they are taken.
OF_MODEL: dict[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 2.0),
    "top_p": ("top_p", 1e-6, 1.0),
    "top_k": ("top_k", 0, 2**31 - 1),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", 1e-6, 10.0),
    "max_new_tokens": ("max_tokens", 1, 2**31 - 1),
}
WHOLE = {"top_k", "max_tokens", "seed"}


class Defaults:
    """Values for what a request leaves open. What the file says may change while requests are read in other threads."""

    def __init__(self, file: Values | None = None) -> None:
        self._models: dict[str, Values] = {}
        self._file: Values = dict(file or {})

    def set(self, file: Values) -> None:
        """Takes these for the requests that come from now on."""
        self._file = dict(file)

    def read_models(self, models: Iterable[str]) -> None:
        """Reads what the authors of these models advise. Models that aren't here advise nothing."""
        from flowinfer.engine import hub  # here: a front without a model needs nothing of the engine

        for model in models:
            try:
                self._models[model] = of_model(hub.resolve(model))
            except (FlowInferError, OSError):
                continue

    def of(self, model: str) -> Values:
        """The defaults of requests to this model, by the names of their fields."""
        return {**self._models.get(model, {}), **self._file}


def of_model(folder: Path) -> Values:
    """What a model's generation_config.json advises. What isn't a number in its range is left out, and logged."""
    try:
        written: Any = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for key, (name, low, high) in OF_MODEL.items():
        value = written.get(key) if isinstance(written, dict) else None
        if value is None:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name in WHOLE else float(value)
        else:
            log.warning("%s: generation_config.json says %s: %r, which isn't taken", folder.name, key, value)
    return found
