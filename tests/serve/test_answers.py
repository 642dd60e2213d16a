"""The shape of answers: choices, usage, log-probabilities, text in every script."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from flowinfer.message import Call, Finish, Opened, Piece, PromptToken, TextLogprob

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}]}


def with_logprobs(call: Call) -> Any:
    first = TextLogprob("é", -0.5, "é".encode(), [("é", -0.5, "é".encode()), ("x", -float("inf"), b"x")])
    second = TextLogprob("\ufffd", -1.5, b"\xf0\x9f")
    yield Piece(id=call.id, text="é", tokens=[1], logprobs=[first])
    yield Piece(id=call.id, text="", tokens=[2], logprobs=[second])
    yield Piece(id=call.id, finish=Finish(reason="length", prompt_tokens=1, completion_tokens=2))


def by_seed(call: Call) -> Any:
    yield Piece(id=call.id, text=str(call.sampling.seed), tokens=[1])
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 3, "drafted_tokens": 7, "accepted_tokens": 2}
    yield Piece(id=call.id, finish=Finish(reason="stop", **usage))


def test_choices_are_gathered_in_order(start: Any) -> None:
    answer = start(by_seed).client().chat.completions.create(**ASK, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].message.content == "1"
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_a_prompt_counts_once_however_many_choices(start: Any) -> None:
    usage = start(by_seed).client().chat.completions.create(**ASK, n=2).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert usage.completion_tokens_details.rejected_prediction_tokens == 10


def test_streamed_choices_carry_their_index(start: Any) -> None:
    texts = {0: "", 1: ""}
    ends = []
    for chunk in start(by_seed).client().chat.completions.create(**ASK, n=2, seed=1, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts[0] == "1"
    assert texts[1] not in ("", "1")
    assert sorted(ends) == [0, 1]


def test_the_usage_chunk_comes_last_and_only_when_asked(echoing: Any) -> None:
    create = echoing.client().chat.completions.create
    asked = list(create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert asked[-1].choices == []
    assert asked[-1].usage.total_tokens == 5
    assert all(chunk.usage is None for chunk in asked[:-1])
    assert all(chunk.choices for chunk in create(**ASK, stream=True))


def test_text_in_every_script_arrives_whole(echoing: Any) -> None:
    text = 'héllo wörld 日本語 العربية 👩‍👩‍👧‍👦 "quoted" \\n \t\u2028 \x00'
    ask = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    client = echoing.client()
    assert client.chat.completions.create(**ask).choices[0].message.content == text + " "
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text + " "


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_tokens_bytes_and_alternatives(start: Any, stream: bool) -> None:
    answer = start(with_logprobs).client().chat.completions.create(**ASK, logprobs=True, top_logprobs=2, stream=stream)
    parts = list(answer) if stream else [answer]
    content = [t for part in parts for c in part.choices if c.logprobs for t in c.logprobs.content]
    assert [entry.logprob for entry in content] == [-0.5, -1.5]
    assert content[0].bytes == [0xC3, 0xA9]
    assert [alternative.token for alternative in content[0].top_logprobs] == ["é", "x"]
    assert content[0].top_logprobs[1].logprob == -9999.0  # JSON has no infinity
    assert content[1].bytes == [0xF0, 0x9F]


def test_no_logprobs_unless_asked(start: Any) -> None:
    assert start(with_logprobs).client().chat.completions.create(**ASK).choices[0].logprobs is None


def test_completion_logprobs_have_offsets(start: Any) -> None:
    answer = start(with_logprobs).client().completions.create(model="tiny", prompt="a", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["é", "\ufffd"]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs[0]["é"] == -0.5


@pytest.mark.parametrize("stream", [False, True])
def test_completions_answer_each_prompt(echoing: Any, stream: bool) -> None:
    answer = echoing.client().completions.create(model="tiny", prompt=["a b", "c"], n=2, stream=stream)
    texts = ["", "", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["a b ", "a b ", "c ", "c "]
    if not stream:
        assert answer.usage.prompt_tokens == 6


def test_completions_take_token_ids(echoing: Any) -> None:
    assert echoing.client().completions.create(model="tiny", prompt=[1, 2]).choices[0].text.strip() == "[1 2]"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(echoing: Any, stream: bool) -> None:
    answer = echoing.client().completions.create(model="tiny", prompt="a b", echo=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(c.text for part in parts for c in part.choices) == "a ba b "


def scored(call: Call) -> Any:
    """A prompt <s>, ü in two halves, x; and an answer of one token."""
    tokens = [
        PromptToken(1, "<s>", b"<s>", None),
        PromptToken(5, "\ufffd", b"\xc3", -1.0, [(6, "y", -0.5), (5, "\ufffd", -1.0)]),
        PromptToken(7, "\ufffd", b"\xbc", -2.0, [(6, "y", -0.5)]),
        PromptToken(8, "x", b"x", -float("inf")),
    ]
    yield Piece(id=call.id, opened=Opened(prompt_tokens=4, prompt=tokens))
    yield Piece(id=call.id, text="!", tokens=[9], logprobs=[TextLogprob("!", -0.25, b"!", [("!", -0.25, b"!")])])
    yield Piece(id=call.id, finish=Finish(reason="length", prompt_tokens=4, completion_tokens=1))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_tells_those_of_the_prompt_too(start: Any, stream: bool) -> None:
    client = start(scored).client()
    answer = client.completions.create(model="tiny", prompt="üx", echo=True, logprobs=1, max_tokens=1, stream=stream)
    choices = [choice for part in (list(answer) if stream else [answer]) for choice in part.choices]
    told = [choice.logprobs for choice in choices if choice.logprobs]
    assert "".join(choice.text for choice in choices) == "üx!"
    assert [value for part in told for value in part.token_logprobs] == [None, -1.0, -2.0, -9999.0, -0.25]
    assert [at for part in told for at in part.text_offset] == [0, 0, 1, 1, 2]
    assert [top for part in told for top in part.top_logprobs][:2] == [None, {"y": -0.5, "\ufffd": -1.0}]


def test_an_echo_of_token_ids_is_spelled_from_them(start: Any) -> None:
    answer = start(scored).client().completions.create(model="tiny", prompt=[5, 7, 8], echo=True)
    assert answer.choices[0].text == "<s>üx!"


def test_prompt_logprobs_come_as_the_clients_of_vllm_read_them(start: Any) -> None:
    client = start(scored).client()
    chat = client.chat.completions.create(**ASK, extra_body={"prompt_logprobs": 2})
    completion = client.completions.create(model="tiny", prompt="üx", extra_body={"prompt_logprobs": 2})
    assert chat.prompt_logprobs == completion.choices[0].prompt_logprobs
    first, second, third, last = chat.prompt_logprobs
    assert first is None
    assert second == {
        "5": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        "6": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
    }
    assert third["7"]["rank"] is None
    assert last == {"8": {"logprob": -9999.0, "rank": None, "decoded_token": "x"}}


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_running_usage_goes_with_every_chunk_that_has_choices(start: Any, path: str) -> None:
    client = start(scored).client()
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    if path == "chat":
        chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options=options))
    else:
        chunks = list(client.completions.create(model="tiny", prompt="x", stream=True, stream_options=options))
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks]
    assert counts[0][0] == 4
    assert counts == sorted(counts)
    assert counts[-2:] == [(4, 1), (4, 1)]
    assert (len(chunks[-1].choices), chunks[-1].usage.total_tokens) == (0, 5)


def test_running_usage_needs_no_usage_at_the_end(start: Any) -> None:
    options: dict[str, Any] = {"continuous_usage_stats": True}
    chunks = list(start(scored).client().chat.completions.create(**ASK, stream=True, stream_options=options))
    assert all(chunk.choices and chunk.usage.prompt_tokens == 4 for chunk in chunks)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_obfuscated_events_hide_how_long_their_text_is(start: Any, path: str) -> None:
    def spelled(call: Call) -> Any:
        for count in (1, 2, 3, 4):
            yield Piece(id=call.id, text="x" * count, tokens=[1])
        yield Piece(id=call.id, finish=Finish(reason="stop"))

    body = {"model": "tiny", "stream": True, "stream_options": {"include_obfuscation": True}}
    asked = {"prompt": "x"} if path == "completions" else {"messages": ASK["messages"]}
    service = start(spelled)
    text = httpx.post(f"{service.url}/v1/{path}", json=body | asked).text
    frames = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    assert len(frames) > 1
    assert {len(frame.encode()) % 32 for frame in frames} == {0}
    assert all(json.loads(frame)["obfuscation"] for frame in frames)


def test_the_tier_that_served_is_told_where_one_was_asked_for(echoing: Any) -> None:
    create = echoing.client().chat.completions.create
    assert create(**ASK, service_tier="auto").service_tier == "default"
    assert create(**ASK).service_tier is None


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_reads_as_the_benchmark_of_vllm_reads_it(start: Any, path: str) -> None:
    """It counts an event with a choice as a token, the first as the first, and takes the sum from the usage event."""

    def spelled(call: Call) -> Any:
        yield Piece(id=call.id, opened=Opened(prompt_tokens=3))
        for word in ("a ", "b ", "c"):
            yield Piece(id=call.id, text=word, tokens=[1])
        yield Piece(id=call.id, finish=Finish(reason="length", prompt_tokens=3, completion_tokens=3))

    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "stream": True, "max_tokens": 3, "ignore_eos": True, "stream_options": options}
    asked = {"prompt": "x"} if path == "completions" else {"messages": ASK["messages"]}
    with httpx.stream("POST", f"{start(spelled).url}/v1/{path}", json=body | asked) as response:
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    texts = []
    for event in events:
        for choice in event["choices"]:
            texts.append((choice["text"] if path == "completions" else choice["delta"].get("content")) or "")
    assert "".join(texts) == "a b c"
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 3)


def test_extensions_travel_in_the_extra_body(service: Any) -> None:
    stream = service.client().chat.completions.create
    thread = threading.Thread(target=lambda: stream(**ASK, extra_body={"top_k": 5, "cache_salt": "me"}))
    thread.start()
    call = service.next_call()
    assert (call.sampling.top_k, call.cache_salt) == (5, "me")
    service.say(call.id, "x", finish="stop")
    thread.join()
