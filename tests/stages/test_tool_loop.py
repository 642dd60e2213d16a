"""Calls that are required, from the request to the pieces of the answer: flowinfer-mini, DeepSeek's format, drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from decode_loop import Service

from flowinfer.engine import hub
from flowinfer.fakes import FakeContext
from flowinfer.message import Call, Opening, Piece, Prompt, Sampling, Tokens, ToolChoice
from flowinfer.stages.detokenize.stage import Detokenize
from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

pytest.importorskip("deepseek_recipe")
NAME = "flowinfer-mini"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    torch.set_num_threads(1)
    return load_tokenizer(hub.resolve(NAME))


@pytest.fixture(scope="module", params=["none", "ngram"])
def service(request: pytest.FixtureRequest) -> Service:
    return Service(Path(NAME), num_blocks=40, draft=request.param)


def prompts_of(tokenizer: TextTokenizer, *calls: Call) -> list[Prompt]:
    context: Any = None
    stage = RecipeTokenize(RecipeTokenize.Config(recipe="deepseek-v4"), context)
    stage.use(tokenizer)
    return [stage._prompt(call) for call in calls]


def pieces_of(tokenizer: TextTokenizer, prompt: Prompt, tokens: list[int], finish: Any) -> Iterator[Piece]:
    """The answer as it streams, two tokens a step."""
    stage = Detokenize(Detokenize.Config(), FakeContext())
    stage.use(tokenizer)
    opening = Opening(id=prompt.id, sampling=prompt.sampling, prompt_tokens=len(prompt.tokens), cached_tokens=0)
    for at in range(0, len(tokens), 2):
        new = tokens[at : at + 2]
        step = Tokens(step=at, ids=[prompt.id], counts=np.array([len(new)], np.int32), tokens=np.array(new, np.int32))
        step.opened = [opening] if at == 0 else []
        step.finished = {0: finish} if at + 2 >= len(tokens) else {}
        for text in stage.step([step]):
            yield from text.pieces


def answer(tokenizer: TextTokenizer, service: Service, **fields: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of one answer."""
    sampling = Sampling(max_tokens=600, seed=1, **fields.pop("sampling", {}))
    id = f"r{len(service.client.ended)}"
    (prompt,) = prompts_of(tokenizer, Call(id=id, sampling=sampling, messages=ASK, tools=TOOLS, **fields))
    service.send(prompt)
    tokens = service.finish([id])[id]
    assert service.client.ended[id].reason == "stop", tokenizer.decode(tokens)
    pieces = list(pieces_of(tokenizer, prompt, tokens, service.client.ended[id]))
    calls: dict[int, list[str]] = {}
    for part in (part for piece in pieces for part in piece.calls):
        calls.setdefault(part.index, [part.name, ""])[1] += part.arguments
    found = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces), found


def test_a_required_call_follows_its_schema(tokenizer: TextTokenizer, service: Service) -> None:
    choice = ToolChoice(required=True, names=("weather",), parallel=False)
    sampling = {"temperature": 1.0}
    args = {"reasoning_effort": "none"}
    said = answer(tokenizer, service, tool_choice=choice, sampling=sampling, template_args=args)
    ((name, arguments),) = said[2]
    assert (said[0], said[1].strip(), name) == ("", "", "weather")
    jsonschema.validate(arguments, SCHEMA)


def test_a_required_call_comes_behind_reasoning(tokenizer: TextTokenizer, service: Service) -> None:
    closes = tokenizer.vocabulary.full.token_to_id("</think>")
    sampling = {"temperature": 1.0, "logit_bias": {closes: 7.0}}
    choice = ToolChoice(required=True, parallel=False)
    reasoning, text, calls = answer(
        tokenizer, service, tool_choice=choice, sampling=sampling, template_args={"reasoning_effort": "low"}
    )
    assert len(calls) == 1 and not text.strip() and reasoning


def test_drafts_are_proposed_within_calls(tokenizer: TextTokenizer, service: Service) -> None:
    """Runs last: what the two tests above gave is the same with drafts and without."""
    drafted = sum(end.drafted_tokens for end in service.client.ended.values())
    assert (drafted > 0) == (service.group.by_name["verify"].stage.config.draft == "ngram")  # type: ignore[attr-defined]
