"""Chat completions as the official client sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello wide world"}]}


def test_a_chat_is_answered(echoing: Any) -> None:
    answer = echoing.client().chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "hello wide world "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_a_chat_streams(echoing: Any) -> None:
    chunks = list(echoing.client().chat.completions.create(**ASK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello wide world "
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert len({c.id for c in chunks}) == 1


def test_the_async_client_works(echoing: Any) -> None:
    async def talk() -> str:
        client = openai.AsyncOpenAI(base_url=f"{echoing.url}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(**ASK, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        whole = await client.chat.completions.create(**ASK)
        await client.close()
        return text + (whole.choices[0].message.content or "")

    assert asyncio.run(talk()) == "hello wide world " * 2
