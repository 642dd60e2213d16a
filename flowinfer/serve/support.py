"""Which fields of which API are honoured, in a table made from the types and rules that read requests.

`python -m flowinfer.serve.support` prints it; `flowinfer/serve/FIELDS.md` holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from flowinfer.serve.anthropic import messages as anthropic
from flowinfer.serve.openai import chat, completions, responses

Rules = Iterable[tuple[str, tuple[Any, ...]]]
_LABELS = {"metadata", "user", "safety_identifier", "prompt_cache_key", "cache_control"}
_NOTES = {
    ("chat", "tools"): "with a tool parser",
    ("completions", "best_of"): "only as `n`",
    ("chat", "prompt_logprobs"): "not streamed",
    ("completions", "prompt_logprobs"): "not streamed",
    ("responses", "stream"): "not with `background`",
}
HEAD = """# Fields of requests

Each field is honoured or refused by its name with 400; none is ignored, and fields that aren't listed are refused.
"yes": honoured. "label": taken, changes no answer: `user` and `prompt_cache_key` keep a session in its arm of an
experiment. "only ...": these values ask for nothing; all others are refused.

"""
INSIDE = """
## Inside of fields

Objects inside of a request are as strict: what isn't listed here is refused by its place, as in `tools[0].function.x`.

- `stream_options`: `include_usage`, `include_obfuscation` (events are padded at random), `continuous_usage_stats`
  (usage so far in every chunk of chat and completions).
- `messages` of chat: text, also as parts; `name`, `refusal`, `reasoning_content`, `tool_calls`, `tool_call_id`. Images,
  audio, files and `function_call` are refused.
- `tools` of chat and responses: functions, with `strict`. Custom tools and those that OpenAI's servers run are refused.
- `input` of responses: messages of text, reasoning, function calls and their outputs. `text`: `format`, `verbosity`
  (only `"medium"`). `reasoning`: `effort`; `summary`, `mode` and `context` are refused. `include`:
  `message.output_text.logprobs` and `reasoning.encrypted_content`, which is empty, as reasoning comes as it is.
- `messages` and `system` of messages: text, `tool_use`, `tool_result`, `thinking`, `redacted_thinking`. Images,
  documents and search results are refused. `cache_control` makes usage tell what was stored in the cache: all is.
- `thinking` of messages: `type`. `budget_tokens` is taken and can't be held; `output_config.effort` says how much.
- `output_config` of messages: `effort`, `format` with a JSON Schema.
- `tools` of messages: custom ones, with `strict`. `input_examples` are refused, and tools that Anthropic's servers run.
"""
APIS: Mapping[str, tuple[type[msgspec.Struct], Rules]] = {
    "chat": (chat.ChatRequest, chat.NEUTRAL),
    "completions": (completions.CompletionRequest, completions.NEUTRAL),
    "responses": (responses.ResponsesRequest, responses.NEUTRAL),
    "messages": (anthropic.MessageRequest, (*anthropic.NEUTRAL, *anthropic.NEUTRAL_ALONE)),
}


def standing(api: str, field: str) -> str:
    """How a field of an API stands: "yes", "label", "only ...", "refused", or "" where the API has none of the name."""
    kind, rules = APIS[api]
    if field not in kind.__struct_fields__:
        return ""
    if (api, field) in _NOTES:
        return _NOTES[api, field]
    values = dict(rules).get(field)
    if values is None:
        return "label" if field in _LABELS else "yes"
    return "only " + " ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values) if values else "refused"


def table() -> str:
    """The whole page, as Markdown."""
    fields = sorted({field for kind, _ in APIS.values() for field in kind.__struct_fields__})
    rows = [f"| `{field}` | " + " | ".join(standing(api, field) for api in APIS) + " |" for field in fields]
    lines = [HEAD + "| field | " + " | ".join(APIS) + " |", "|---" * (len(APIS) + 1) + "|", *rows]
    return "\n".join(lines) + "\n" + INSIDE


if __name__ == "__main__":
    print(table(), end="")
