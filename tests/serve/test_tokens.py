"""/tokenize and /detokenize, with vLLM's shapes and the pipeline's own ids."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flowinfer.engine import hub
from flowinfer.errors import FlowInferError
from flowinfer.text.tokenizer import load_tokenizer


def test_a_service_without_a_tokenizer_says_so(service: Any) -> None:
    response = httpx.post(f"{service.url}/tokenize", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_tokenizer")


def test_text_and_chats_there_and_back(start: Any) -> None:
    try:
        tokenizer = load_tokenizer(hub.resolve("smollm2-135m"))
    except FlowInferError as error:
        pytest.skip(str(error))
    url = start(models=("smollm2-135m",)).url
    said = httpx.post(f"{url}/tokenize", json={"prompt": "Hé <|im_end|>", "return_token_strs": True}).json()
    assert said["tokens"] == tokenizer.encode_prompt("Hé <|im_end|>").tolist()
    assert (said["count"], said["max_model_len"]) == (len(said["tokens"]), tokenizer.context_length)
    assert len(said["token_strs"]) == said["count"]
    assert not tokenizer.control_ids & set(said["tokens"])  # typed by a user, it is text
    back = httpx.post(f"{url}/detokenize", json={"tokens": said["tokens"]}).json()
    assert back == {"prompt": "Hé <|im_end|>"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == tokenizer.encode_segments(tokenizer.render(messages)).tolist()
    bare = httpx.post(f"{url}/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert bare["tokens"] == chat["tokens"][: bare["count"]]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ):
        refused = httpx.post(url + path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
