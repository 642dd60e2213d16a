"""People's own clients over a real model: the README's examples as they stand, both APIs, the same answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from harness import Service

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STORY = (
    "Once upon a time, there was a brave mouse who lived near a pond. The mouse had nobody to play with. "
    "One sunny day, a pony came to the pond. Both were too shy to speak. "
)
QUESTION = [{"role": "user", "content": "Name three primary colors."}]


# On a machine that tests keep busy, answers of any length would take minutes.
SHORTER = {
    '"max_tokens": 200, ': "",
    '"messages": [': '"max_tokens": 12, "messages": [',
    "max_tokens=200, ": "",
    "messages=chat": "messages=chat, max_tokens=12",
    "max_tokens: 200, ": "",
    "messages, stream: true": "messages, max_tokens: 12, stream: true",
    'model: "flowinfer-mini", messages });': 'model: "flowinfer-mini", max_tokens: 12, messages });',
}


def example(name: str, port: int) -> str:
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"no example {name}"
    code = found[1].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


@pytest.fixture
def claude(prod: Service) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{prod.port}", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize(
    ("api", "language"),
    [("openai", "curl"), ("openai", "python"), ("anthropic", "curl"), ("anthropic", "python"), ("choices", "curl")],
)
def test_the_readmes_examples_answer(prod: Service, api: str, language: str) -> None:
    code = example(f"{api}: {language}", prod.port)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_readmes_javascript_answers(prod: Service, api: str, tmp_path: Path) -> None:
    node, modules = shutil.which("node"), ROOT / "tests" / "js" / "node_modules"
    if node is None or not (modules / "openai").exists():
        assert not os.environ.get("CI"), "node and `npm ci` in tests/js are .ci/run's"
        pytest.skip("needs node, and `npm ci` in tests/js")
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "example.mjs").write_text(example(f"{api}: javascript", prod.port))
    done = subprocess.run([node, "example.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_both_apis_give_the_same_answer(prod: Service, claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": prod.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{prod.port}/v1", api_key="none", max_retries=0, timeout=60)
    wanted = client.chat.completions.create(**ask)
    del ask["temperature"]  # the client doesn't know it any more; the service does
    ask["extra_body"] = {"temperature": 0}
    got = claude.messages.create(**ask)
    (block,) = got.content
    assert (block.type, block.text) == ("text", wanted.choices[0].message.content)
    assert wanted.usage is not None
    assert got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0) == wanted.usage.prompt_tokens
    counted = claude.messages.count_tokens(model=prod.model, messages=QUESTION)
    assert counted.input_tokens == wanted.usage.prompt_tokens
    with claude.messages.stream(**ask) as stream:
        first = next(event for event in stream if event.type == "message_start").message.usage
        final = stream.get_final_message()
    assert first.input_tokens + (first.cache_read_input_tokens or 0) == wanted.usage.prompt_tokens
    assert [part.text for part in final.content if part.type == "text"] == [block.text]
    assert final.stop_reason == got.stop_reason


def test_a_prompt_is_scored_anew_each_time(prod: Service) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{prod.port}/v1", api_key="none", max_retries=0, timeout=60)
    prompt = STORY * 4
    ask: Any = {"model": prod.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    client.completions.create(**ask)  # leaves the prompt in the cache
    answers = [client.completions.create(**ask, echo=True) for _ in range(2)]
    for answer in answers:
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        (choice,) = answer.choices
        assert choice.text.startswith(prompt)
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert len(told.tokens) == answer.usage.prompt_tokens + 1
        assert "".join(told.tokens) == choice.text
        assert told.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in told.token_logprobs[1:])
        assert sum(told.token_logprobs[-20:]) > -10  # type: ignore[arg-type]  # such stories are what it was trained on
    first, second = (answer.choices[0].logprobs for answer in answers)
    assert first is not None
    assert second is not None
    assert first.token_logprobs == second.token_logprobs


def test_a_stop_sequence_is_named(prod: Service, claude: anthropic.Anthropic) -> None:
    stops, greedy = ["ed", ","], {"temperature": 0}
    got = claude.messages.create(
        model=prod.model, messages=QUESTION, max_tokens=60, stop_sequences=stops, extra_body=greedy
    )
    assert (got.stop_reason, got.stop_sequence in ("ed", ",")) == ("stop_sequence", True)


def test_tools_that_the_template_does_not_know_are_refused(prod: Service, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        claude.messages.create(
            model=prod.model, messages=QUESTION, max_tokens=9, tools=[{"name": "f", "input_schema": {"type": "object"}}]
        )
