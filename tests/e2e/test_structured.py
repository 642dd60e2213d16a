"""Structured output of a real model through real processes, asked for by the official client."""

from __future__ import annotations

from typing import Literal

import openai
from harness import Service
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["glad", "sad"]


def test_the_clients_own_parser_gets_what_it_asked_for(prod: Service) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{prod.port}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.parse(
        model=prod.model,
        messages=[{"role": "user", "content": "Describe Anna, who is 30 years old."}],
        response_format=Person,
        temperature=0,
        max_tokens=200,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_streams_choices_and_completions_follow_too(prod: Service) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{prod.port}/v1", api_key="none", max_retries=0, timeout=60)
    stream = client.chat.completions.create(
        model=prod.model,
        messages=[{"role": "user", "content": "Is the sky blue?"}],
        stream=True,
        max_tokens=40,
        extra_body={"guided_choice": ["yes, it is", "no, it isn't"]},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text in ("yes, it is", "no, it isn't")
    found = client.completions.create(
        model=prod.model, prompt="The year was ", max_tokens=20, n=2, extra_body={"guided_regex": "1[0-9]{3}"}
    )
    assert all(len(choice.text) == 4 and choice.text[0] == "1" for choice in found.choices)
