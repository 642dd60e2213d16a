"""Writes answers as JSON and as server-sent events. Events are spliced from halves encoded once a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowinfer.message import Finish, Piece, PromptToken, TextLogprob

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
LEAST = -9999.0  # told for -inf, which isn't JSON


def halves(frame: dict[str, Any]) -> tuple[bytes, bytes]:
    """An event around the one place in `frame` that holds SPOT: what stands before it and after it."""
    before, _, after = (b"data: " + encode(frame) + b"\n\n").partition(encode(SPOT))
    return before, after


SPOT = "\x00here\x00"  # can't occur otherwise: ids are ours and model names hold no control characters


def usage_of(finishes: Iterable[Finish], num_choices: int) -> dict[str, Any]:
    """Token counts over all choices. A prompt counts once however many choices it has (num_choices each)."""
    ends = list(finishes)
    prompts = ends[::num_choices]
    prompt, completion = sum(end.prompt_tokens for end in prompts), sum(end.completion_tokens for end in ends)
    accepted = sum(end.accepted_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.drafted_tokens for end in ends) - accepted,
        },
    }


def finish_of(piece: Piece) -> Finish:
    """The finish of a last piece."""
    assert piece.finish is not None, "an answer is written only once every choice has ended"
    return piece.finish


def finishes(pieces: Sequence[Piece]) -> list[Finish]:
    return [finish_of(piece) for piece in pieces]


def chat_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        _token(e.text, e.logprob, e.data) | {"top_logprobs": [_token(*alternative) for alternative in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TextLogprob], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion choice whose text so far is `offset` characters long."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [max(e.logprob, LEAST) for e in entries],
        "top_logprobs": [{text: max(logprob, LEAST) for text, logprob, _ in e.top} for e in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(tokens: Sequence[PromptToken]) -> list[Any]:
    """`prompt_logprobs` as vLLM's clients read them: null for the first token, then {id: {logprob, rank, text}}."""
    return [None if token.logprob is None else _ranked(token, token.logprob) for token in tokens]


def _ranked(token: PromptToken, logprob: float) -> dict[str, dict[str, Any]]:
    best: dict[int, tuple[int | None, str, float]] = {
        id: (rank, text, value) for rank, (id, text, value) in enumerate(token.top, 1)
    }
    found = {token.token: best.pop(token.token, (None, token.text, logprob)), **best}
    return {
        str(id): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}
        for id, (rank, text, logprob) in found.items()
    }


def echoed_logprobs(tokens: Sequence[PromptToken], text: str) -> dict[str, Any]:
    """`logprobs` of a completion's echoed prompt. Tokens that the text doesn't show (as a first <s>) take no room."""
    data, at, offset, offsets = text.encode("utf-8", "surrogatepass"), 0, 0, []
    for token in tokens:
        offsets.append(offset)
        if data.startswith(token.data, at):
            at += len(token.data)
            offset += sum(byte & 0xC0 != 0x80 for byte in token.data)  # bytes that begin a character
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if token.logprob is None else max(token.logprob, LEAST) for token in tokens],
        "top_logprobs": [None if t.logprob is None else _by_text(t.top) for t in tokens],
        "text_offset": offsets,
    }


def _by_text(top: Sequence[tuple[int, str, float]]) -> dict[str, float]:
    return {text: max(logprob, LEAST) for _, text, logprob in top}


def _token(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}
