"""What each stage of a worker did when, for the last steps: a ring that `flowinfer trace` asks for. Decides nothing.

Off until somebody asks for the first time. Then 0.7 µs a step and 0.1 µs a message (tests/runtime/test_trace.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowinfer.message import Message, TracedStep

NUM_STEPS = 20_000  # about 4 MB; minutes of a busy worker


class Trace:
    """The last steps of a worker's stages. began: seconds of the clock that `add` is given."""

    def __init__(self, began: float, num_steps: int = NUM_STEPS) -> None:
        self.began = began
        self._steps: deque[tuple[str, float, float, list[Any]]] = deque(maxlen=num_steps)

    def add(self, stage: str, inputs: Sequence[Sequence[Message]], started: float, ended: float) -> None:
        """Notes a step. Keeps ids only: a message would keep its arrays."""
        ids: list[Any] = []
        for messages in inputs:
            for message in messages:
                if hasattr(message, "id"):
                    ids.append(message.id)
                elif hasattr(message, "ids"):
                    ids.append(message.ids)
                elif hasattr(message, "pieces"):
                    ids.append([piece.id for piece in message.pieces])
        self._steps.append((stage, started, ended, ids))

    def of(self, request: str) -> list[TracedStep]:
        """Steps that took a message of this request, and behind its first one those of stages that know only slots."""
        found: list[TracedStep] = []
        for stage, started, ended, ids in list(self._steps):
            takes = any(request == entry or (type(entry) is list and request in entry) for entry in ids)
            if takes or (found and not ids):
                found.append(TracedStep(stage=stage, started=started, ended=ended, batch=len(ids), shared=not takes))
        return found
