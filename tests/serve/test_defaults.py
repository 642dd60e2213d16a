"""What a request leaves open comes from the file, else from the model, else it is as in the OpenAI API."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flowinfer.errors import SpecError
from flowinfer.graph import load_plan
from flowinfer.graph.diff import compare
from flowinfer.graph.plan import API, Plan
from flowinfer.message import Sampling
from flowinfer.runtime.loading import load_class
from flowinfer.serve.anthropic.messages import MessageRequest, message_job
from flowinfer.serve.defaults import Defaults, of_model
from flowinfer.serve.gateway import GatewayConfig
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.job import Limits

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
USER = [{"role": "user", "content": "hi"}]
FILE: dict[str, float] = {
    "temperature": 0.3,
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "max_tokens": 33,
    "seed": 5,
}


def sampling(kind: str, defaults: Defaults, **fields: Any) -> Sampling:
    limits = Limits(("tiny",), 64, 1_000, tools=False, defaults=defaults)
    if kind == "completion":
        body = {"model": "tiny", "prompt": "hi"} | fields
        return completion_job(decode(CompletionRequest, json.dumps(body).encode()), "c", limits).calls[0].sampling
    body = {"model": "tiny", "messages": USER} | fields
    if kind == "message":
        body = {"max_tokens": 33} | body
        return message_job(decode(MessageRequest, json.dumps(body).encode()), "m", limits).calls[0].sampling
    return chat_job(decode(ChatRequest, json.dumps(body).encode()), "h", limits).calls[0].sampling


@pytest.mark.parametrize("kind", ["chat", "completion", "message"])
def test_every_default_of_the_file_is_taken_by_every_api(kind: str) -> None:
    found = sampling(kind, Defaults(FILE))
    assert {name: getattr(found, name) for name in FILE} == FILE


@pytest.mark.parametrize("kind", ["chat", "completion", "message"])
def test_what_the_request_says_goes_first(kind: str) -> None:
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 9}
    found = sampling(kind, Defaults(FILE), **said)
    assert {name: getattr(found, name) for name in said} == said
    assert found.min_p == FILE["min_p"]


def test_without_defaults_requests_are_as_in_the_openai_api() -> None:
    found = sampling("chat", Defaults())
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (1.0, 1.0, 0, 1_000)
    assert sampling("completion", Defaults()).max_tokens == 16


def test_the_file_overrides_the_model_value_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 8}))
    monkeypatch.setattr("flowinfer.engine.hub.resolve", lambda model: tmp_path)
    defaults = Defaults({"temperature": 0.2})
    defaults.read_models(["tiny"])
    found = sampling("chat", defaults)
    assert (found.temperature, found.top_k, found.max_tokens) == (0.2, 20, 8)
    defaults.set({})
    assert sampling("chat", defaults).temperature == 0.6


def test_what_a_model_says_out_of_range_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = {"temperature": 9, "top_p": True, "min_p": "x", "repetition_penalty": 1.1, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(words))
    with caplog.at_level(logging.WARNING):
        assert of_model(tmp_path) == {"repetition_penalty": 1.1}
    assert len(caplog.records) == 3
    (tmp_path / "generation_config.json").write_text("[")
    assert of_model(tmp_path) == {} == of_model(tmp_path / "none")


def plan(*sets: str) -> Plan:
    return load_plan(QUICKSTART, (), sets)


def test_the_file_holds_them_and_a_running_service_takes_them_in_place() -> None:
    before, after = plan(), plan("serve.sampling.temperature=0.3", "serve.sampling.top_k=5")
    assert GatewayConfig.model_validate(after.stages[API].config).sampling == {"temperature": 0.3, "top_k": 5}
    changes = compare(before, after, lambda stage: load_class(stage.kind)).changes
    assert [(change.path, change.kind, change.after) for change in changes] == [
        ("serve.sampling.temperature", "live", 0.3),
        ("serve.sampling.top_k", "live", 5),
    ]


@pytest.mark.parametrize("bad", ["temperature=3", "top_p=0", "seed=-1", "max_tokens=0", "warmth=1"])
def test_a_default_out_of_range_is_refused(bad: str) -> None:
    with pytest.raises(SpecError):
        plan(f"serve.sampling.{bad}")
