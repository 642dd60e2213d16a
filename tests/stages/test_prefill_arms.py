"""What waits for an experiment's arm B holds up nothing of arm A in the prefill that both share."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from flowinfer.fakes import FakeContext
from flowinfer.message import Prompt, Sampling, Sequence
from flowinfer.stages.prefill.stage import Prefill


class Arms(FakeContext):
    """Decode of arm A has credit, that of arm B none."""

    def reserve(self, output: str, request: str, amount: int) -> str | None:
        return None if request.startswith("b") else "decode.0"


class NoModel:
    """An engine that holds whatever it is given, and computes nothing."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(blocks_for=lambda tokens: 1)
        self.pool = SimpleNamespace(num_blocks=100)
        self.starved = False
        self.held: dict[str, Any] = {}

    def start(self, prompt: Prompt) -> Any:
        self.held[prompt.id] = prompt
        return prompt


class Admitting(Prefill):
    """Admits prompts, and computes none."""

    def _start(self, prompt: Prompt) -> Iterable[Sequence]:
        self.prompts[prompt.id] = prompt
        return ()


def test_prompts_of_arm_a_pass_those_that_wait_for_arm_b() -> None:
    ctx = Arms("prefill")
    stage = Admitting(Prefill.Config(), ctx)
    stage.engine = NoModel()  # type: ignore[assignment]
    stage.waiting, stage.since, stage.prompts, stage.lessee, stage.blocked = {}, {}, {}, {}, False
    for number in range(6):
        for arm in "ba":
            id = f"{arm}{number}"
            tokens = np.arange(8, dtype=np.int32)
            stage.waiting[id] = Prompt(id=id, tokens=tokens, sampling=Sampling(), arm="b" if arm == "b" else "")
            stage.since[id] = 0.0
    list(stage._admit(0.0))
    assert set(stage.prompts) == {f"a{number}" for number in range(6)}
    assert set(stage.waiting) == {f"b{number}" for number in range(6)}
    assert {request for _, request in ctx.returned} == set(stage.waiting)  # whose places others may have
