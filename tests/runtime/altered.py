"""A stage whose worker speaks other messages once a file is there, as after a change of FlowInfer's code on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
from stages_for_tests import CallRelay

from flowinfer.message import Message
from flowinfer.stage import StageConfig


class Altered(CallRelay):
    """Passes calls on."""

    class Config(StageConfig):
        changed: str

    def open(self) -> None:
        if Path(self.config.changed).exists():
            msgspec.defstruct("Extra", [("id", str)], bases=(Message,), module="flowinfer.message")
