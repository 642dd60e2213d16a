"""Both stages in a worker's loop: a stop string's last piece reaches the gateway before the cancel that follows it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowinfer.graph.plan import API, EdgePlan, Plan, StagePlan
from flowinfer.message import Call, Opening, Piece, Prompt, Sampling, Text, Tokens
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.group import Group, Host
from flowinfer.stage import Stage
from flowinfer.stages.detokenize.stage import Detokenize
from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize

TINY = str(Path(__file__).parents[1] / "data" / "tiny_chat")


class Api(Stage):
    """Sends one chat, and notes pieces and cancels in the order in which they come."""

    busy = True  # type: ignore[assignment]

    def open(self) -> None:
        self.log: list[Piece | str] = []
        self.calls = [Call(id="a", sampling=Sampling(stop=("##",)), messages=[{"role": "user", "content": "Hi"}])]

    def step(self, texts: list[Text]) -> Iterable[Call]:
        self.log += [piece for text in texts for piece in text.pieces]
        calls, self.calls = self.calls, []
        return calls

    def cancel(self, requests: Collection[str]) -> None:
        self.log += [f"cancel {request}" for request in requests]


class Parrot(Stage):
    """Answers a prompt with its own tokens and a stop string, all at once."""

    def step(self, prompts: list[Prompt]) -> Iterable[Tokens]:
        for prompt in prompts:
            tokens = np.append(prompt.tokens, [5, 5, 6]).astype(np.int32)  # id 5 is # here
            opening = Opening(id=prompt.id, sampling=prompt.sampling, prompt_tokens=len(prompt.tokens), cached_tokens=0)
            yield Tokens(
                step=1, ids=[prompt.id], counts=np.array([len(tokens)], np.int32), tokens=tokens, opened=[opening]
            )


STAGES: dict[str, type[Stage]] = {API: Api, "tokenize": RecipeTokenize, "parrot": Parrot, "detokenize": Detokenize}


@pytest.fixture
def group() -> Group:
    model = {"tokenize": {"model": TINY}, "detokenize": {"model": TINY}}
    plans = {
        name: StagePlan(name=name, kind=cls.kind, config=model.get(name, {}), worker="front")
        for name, cls in STAGES.items()
    }
    wires = [(API, "tokenize", "Call", "calls"), ("tokenize", "parrot", "Prompt", "prompts")]
    wires += [("parrot", "detokenize", "Tokens", "tokens"), ("detokenize", API, "Text", "texts")]
    edges = tuple(
        EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=message, port=port, fused=True)
        for a, b, message, port in wires
    )
    plan = Plan(name="t", digest="", file="t.yaml", stages=plans, edges=edges, workers={})

    def no_arena(layout: Any) -> Any:
        raise AssertionError("these stages hold no KV")

    group = Group(
        plan,
        list(plans.values()),
        Host(no_arena),
        lambda stage: STAGES[stage.name],
        name="front.0",
        generation=1,
        clock=SystemClock(),
    )
    group.open()
    return group


def test_the_last_piece_comes_before_the_cancel(group: Group) -> None:
    for _ in range(10):
        group.turn()
    api = group.by_name[API].stage
    assert isinstance(api, Api)
    piece, cancel = api.log
    assert isinstance(piece, Piece) and piece.finish is not None
    assert (piece.text, piece.finish.reason, piece.finish.stop) == ("user\nHi\nassistant\n", "stop", "##")
    assert cancel == "cancel a"
