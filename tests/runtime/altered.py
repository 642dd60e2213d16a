"""Stages that wait for a file: to speak other messages, as after a change of FlowInfer's code on disk, or to open."""

from __future__ import annotations

import time
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


class Blocked(CallRelay):
    """Opens once a file is there."""

    class Config(StageConfig):
        gate: str

    def open(self) -> None:
        while not Path(self.config.gate).exists():
            time.sleep(0.01)
