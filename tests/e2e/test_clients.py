"""People's own clients over a real model: the README's examples as they stand, both APIs, the same answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from harness import Service

README = (Path(__file__).parents[2] / "README.md").read_text()
QUESTION = [{"role": "user", "content": "Name three primary colors."}]


# On a machine that tests keep busy, answers of any length would take minutes.
SHORTER = {
    '"max_tokens": 100, ': "",
    '"messages": [': '"max_tokens": 12, "messages": [',
    "max_tokens=100, ": "",
    "messages=chat": "messages=chat, max_tokens=12",
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


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("language", ["curl", "python"])
def test_the_readmes_examples_answer(prod: Service, api: str, language: str) -> None:
    code = example(f"{api}: {language}", prod.port)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


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
        final = stream.get_final_message()
    assert [part.text for part in final.content if part.type == "text"] == [block.text]
    assert final.stop_reason == got.stop_reason


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
