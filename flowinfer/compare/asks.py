"""The requests of a comparison: the built-in mix, or a file with one a line. Runs nothing.

The built-in prompts were written for FlowInfer and are under its licence, Apache-2.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from flowinfer.errors import FlowInferError

BUILTIN = "builtin"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 64


class Ask(msgspec.Struct, frozen=True):
    """One request of the OpenAI API, without its model. `path` is that of its endpoint."""

    name: str
    path: str
    body: dict[str, Any]

    def with_model(self, model: str, cache_salt: str) -> bytes:
        """The body; the salt keeps what other rounds have cached from this one."""
        salt = self.body.get("cache_salt", "") + cache_salt
        return json.dumps({"model": model, "temperature": 0, **self.body, "cache_salt": salt}).encode()


def load_asks(source: str) -> list[Ask]:
    """The requests of a file, or the built-in mix. Raises FlowInferError with the line at fault.

    A line holds `chat` (text or messages) or `prompt`, and any further fields of the API; or a line of OpenAI's batch
    format.
    """
    path = Path(__file__).parent / "builtin.jsonl" if source == BUILTIN else Path(source)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FlowInferError(
            f"{path} can't be read: {error}.", help="--on takes a file of JSON lines, or builtin."
        ) from error
    asks = [_ask(number, text, path) for number, text in enumerate(lines, start=1) if text.strip()]
    if not asks:
        raise FlowInferError(
            f"{path} holds no requests.", help='A line looks like {"chat": "Hello", "max_tokens": 32}.'
        )
    return asks


def _ask(number: int, text: str, path: Path) -> Ask:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise FlowInferError(f"{path}:{number}: not JSON: {error}.") from error
    if isinstance(line, dict) and "body" in line and "url" in line:
        return Ask(str(line.get("custom_id", number)), str(line["url"]), _unsent(line["body"]))
    if not isinstance(line, dict) or ("chat" in line) == ("prompt" in line):
        raise FlowInferError(f"{path}:{number}: a line holds either chat or prompt.")
    fields = {"max_tokens": MAX_TOKENS, **_unsent(line)}
    if "prompt" in line:
        return Ask(str(number), COMPLETION, fields)
    chat = fields.pop("chat")
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    return Ask(str(number), CHAT, {"messages": messages, **fields})


def _unsent(body: dict[str, Any]) -> dict[str, Any]:
    """Without what the comparison itself sets."""
    return {key: value for key, value in body.items() if key not in ("model", "stream", "stream_options")}
