"""The requests of a comparison: the built-in mix, a file with one a line, or a trace. Runs nothing.

The built-in prompts were written for FlowInfer and are under its licence, Apache-2.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.compare.traffic import TraceOptions

BUILTIN = "builtin"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 64


class Ask(msgspec.Struct, frozen=True):
    """One request of the OpenAI API, without its model. path: of its endpoint.  at: seconds from the first one."""

    name: str
    path: str
    body: dict[str, Any]
    at: float = 0.0

    def with_model(self, model: str, cache_salt: str) -> bytes:
        """The body; the salt keeps what other rounds have cached from this one."""
        salt = self.body.get("cache_salt", "") + cache_salt
        return json.dumps({"model": model, "temperature": 0, **self.body, "cache_salt": salt}).encode()


def load_asks(source: str, options: TraceOptions | None = None) -> list[Ask]:
    """The requests of a file, or the built-in mix. Raises FlowInferError with the line at fault.

    A line holds `chat` (text or messages) or `prompt`, and any further fields of the API; or a line of OpenAI's batch
    format; or, in a trace, lengths and `hash_ids`: these are made into requests as `options` say.
    """
    path = Path(__file__).parent / "builtin.jsonl" if source == BUILTIN else Path(source)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FlowInferError(
            f"{path} can't be read: {error}.", help="--on takes a file of JSON lines, or builtin."
        ) from error
    if any(_is_traced(line) for line in lines[:1]):
        return _traced(path, options)
    asks = [_ask(number, text, path) for number, text in enumerate(lines, start=1) if text.strip()]
    if not asks:
        raise FlowInferError(
            f"{path} holds no requests.", help='A line looks like {"chat": "Hello", "max_tokens": 32}.'
        )
    return asks


def _is_traced(line: str) -> bool:
    """True for a line of a trace."""
    try:
        return "hash_ids" in json.loads(line)
    except (ValueError, TypeError):
        return False


def _traced(path: Path, options: TraceOptions | None) -> list[Ask]:
    from flowinfer.compare.traffic import TraceOptions, asks_of
    from flowinfer.sim.trace import read_trace

    options = options or TraceOptions()
    return asks_of(read_trace(path, options.block_tokens), options)


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
