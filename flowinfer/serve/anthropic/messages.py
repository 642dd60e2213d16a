"""Anthropic's Messages API: checks a request and turns it into a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import Call, Grammar, Sampling, ToolChoice
from flowinfer.serve.anthropic.blocks import Block, Content, check_mark, messages_of, system_text
from flowinfer.serve.anthropic.errors import NO_THREADS
from flowinfer.serve.anthropic.writer import MessageWriter
from flowinfer.serve.openai.fields import (
    MAX_STOP,
    MAX_TOKEN_ID,
    check_model,
    in_range,
    invalid,
    only,
    refuse,
    unsupported,
)
from flowinfer.serve.openai.grammar import schema_grammar
from flowinfer.serve.openai.job import Job, Limits, draw_seed
from flowinfer.serve.openai.tools import choice_of

KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}  # agents say so, and it clears nothing
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Turn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: Content


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config.format`: the JSON Schema that the answer follows."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config` of a request. effort: how long to think, where the template knows of that."""

    effort: str | None = None
    format: OutputFormat | None = None


class Conversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/messages and /v1/messages/count_tokens both take."""

    model: str
    messages: list[Turn]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessageRequest(Conversation, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/messages: every field that the official client sends."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None
    billing_policy: Any = None
    compaction: Any = None
    fallback_credit_token: str | None = None
    fallbacks: Any = None
    thread: Any = None


# What each field may say without changing the answer. metadata, user_profile_id and workspace_id only label a request;
# cache_control asks for what is done anyway.
NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("context_management", ({}, {"edits": []}, {"edits": [KEEPS_THINKING]})),
    ("mcp_servers", ([],)),
    ("speed", ("standard",)),
)
NEUTRAL_ALONE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("service_tier", ("auto", "standard_only")),
    ("container", ()),
    ("diagnostics", ()),
    ("inference_geo", ()),
    ("billing_policy", ({"type": "billing_policy", "bill_to": "self"},)),
    ("compaction", ()),
    ("fallback_credit_token", ()),
    ("fallbacks", ([],)),
    ("thread", ()),
)


_TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),  # arguments stream as they come
    "input_examples": ([],),
}


class Rendered(msgspec.Struct):
    """A conversation as the pipeline takes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_args: dict[str, Any]


def message_job(request: MessageRequest, id: str, limits: Limits) -> Job:
    """The call of a request. Raises RequestError naming the field that is wrong or can't be honoured."""
    rendered = render(request, limits)
    if request.thread is not None:  # by this code the client knows to send whole conversations instead
        text = "'thread' is not supported here: the service holds no conversations of this API."
        raise RequestError(400, text, code=NO_THREADS, param="thread")
    refuse(request, NEUTRAL_ALONE)
    call = Call(
        id=id,
        sampling=_sampling(request, limits.defaults.of(request.model)),
        messages=rendered.messages,
        tools=rendered.tools,
        tool_choice=_tool_choice(request, rendered.tools),
        cache_class="agent" if request.tools else "chat",
        template_args=rendered.template_args,
        session=str((request.metadata or {}).get("user_id") or ""),
    )
    parallel = not (request.tool_choice or {}).get("disable_parallel_tool_use")
    writer = MessageWriter(id, request.model, parallel=parallel, caching=_marks_cache(request))
    return Job(id, [call], bool(request.stream), writer)


def _marks_cache(request: Conversation) -> bool:
    """Whether `cache_control` stands anywhere in the request."""
    contents = [request.system, *(turn.content for turn in request.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return bool(request.cache_control) or any(block.get("cache_control") for block in [*blocks, *(request.tools or ())])


def render(request: Conversation, limits: Limits) -> Rendered:
    """The conversation with its tools. Raises RequestError naming the field at fault."""
    check_model(request.model, limits)
    refuse(request, NEUTRAL)
    check_mark(request.cache_control, "cache_control")
    if not request.messages:
        raise invalid("messages", "needs at least one message.")
    messages = messages_of([(turn.role, turn.content) for turn in request.messages])
    if request.system:
        messages = [{"role": "system", "content": system_text(request.system)}, *messages]
    has_tools = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (request.tools or has_tools) and not limits.tools:
        raise unsupported("tools")
    args: dict[str, Any] = {"reasoning_effort": _effort(request)}
    if request.messages[-1].role == "assistant":
        args["continue_final_message"] = True
        _check_beginning(messages[-1], thinks=_thinks(request))
    return Rendered(messages, _tools(request), args)


def _check_beginning(message: dict[str, Any], *, thinks: bool) -> None:
    """Raises RequestError unless an assistant's last turn is the beginning of an answer, as in Anthropic's own API."""
    if thinks:
        raise invalid("messages", "a last turn of the assistant can't be continued while thinking is enabled.")
    if "tool_calls" in message:
        raise invalid("messages", "a last turn of the assistant that calls tools needs their results behind it.")
    if message["content"] != message["content"].rstrip() or not message["content"]:
        raise invalid("messages", "a last turn of the assistant must not be empty or end with white space.")


def _sampling(request: MessageRequest, defaults: Mapping[str, float]) -> Sampling:
    in_range("max_tokens", request.max_tokens, 1, MAX_TOKEN_ID)
    in_range("temperature", request.temperature, 0, 1)
    in_range("top_p", request.top_p, 0, 1, open_low=True)
    in_range("top_k", request.top_k, 0, MAX_TOKEN_ID)
    stops = tuple(request.stop_sequences or ())
    if len(stops) > MAX_STOP or "" in stops:
        raise invalid("stop_sequences", f"takes up to {MAX_STOP} strings that aren't empty.")

    def value(given: float | None, name: str, otherwise: float) -> float:
        return float(defaults.get(name, otherwise) if given is None else given)

    return Sampling(
        max_tokens=request.max_tokens,
        temperature=value(request.temperature, "temperature", 1.0),
        top_k=int(value(request.top_k, "top_k", 0)),
        top_p=value(request.top_p, "top_p", 1.0),
        min_p=value(None, "min_p", 0.0),
        repetition_penalty=value(None, "repetition_penalty", 1.0),
        presence_penalty=value(None, "presence_penalty", 0.0),
        frequency_penalty=value(None, "frequency_penalty", 0.0),
        seed=int(defaults["seed"]) if "seed" in defaults else draw_seed(),
        stop=stops,
        grammar=_grammar(request),
    )


def _effort(request: Conversation) -> str:
    """How long to think, as templates are told."""
    effort = (request.output_config.effort if request.output_config else None) or "high"
    if effort not in EFFORTS:
        raise invalid("output_config.effort", f"must be one of {', '.join(EFFORTS)}, not {effort[:40]!r}.")
    return effort if _thinks(request) else "none"


def _grammar(request: Conversation) -> Grammar | None:
    given = request.output_config.format if request.output_config else None
    if given is None:
        return None
    if given.type != "json_schema":
        raise invalid("output_config.format.type", f"must be json_schema, not {given.type[:40]!r}.")
    return schema_grammar(given.schema, "output_config.format.schema")


def _thinks(request: Conversation) -> bool:
    """Whether the model is to think first: a budget can't be held, but the switch can."""
    only(request.thinking or {}, "thinking", ("type", "budget_tokens"), {"display": ("summarized",)})
    kind = (request.thinking or {"type": "disabled"}).get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", f"must be enabled, disabled or adaptive, not {str(kind)[:40]!r}.")
    return bool(kind != "disabled")


def _tools(request: Conversation) -> list[dict[str, Any]] | None:
    only(request.tool_choice or {}, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    choice = (request.tool_choice or {"type": "auto"}).get("type")
    if choice not in ("auto", "none", "any", "tool"):
        raise invalid("tool_choice.type", f"must be auto, any, tool or none, not {str(choice)[:40]!r}.")
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())]
    if not tools and choice in ("any", "tool"):
        raise invalid("tool_choice", "is only allowed with tools.")
    return tools or None if choice != "none" else None


def _tool_choice(request: MessageRequest, tools: list[dict[str, Any]] | None) -> ToolChoice:
    """What tool_choice says, told as OpenAI's API has it. Raises RequestError naming the field at fault."""
    given = request.tool_choice or {"type": "auto"}
    kind = given["type"]
    choice: Any = "required" if kind == "any" else kind
    if kind == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    return choice_of(tools, choice, not given.get("disable_parallel_tool_use"))


def _tool(tool: Block, where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", f"{str(tool['type'])[:40]!r} is run by Anthropic's servers, not here")
    only(tool, where, ("type", "name", "description", "input_schema", "strict", "cache_control"), _TOOL_NEUTRAL)
    check_mark(tool.get("cache_control"), f"{where}.cache_control")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise invalid(f"{where}.name", "must be a name.")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", "must be a JSON Schema, which is an object.")
    if not isinstance(tool.get("strict"), bool | None):
        raise invalid(f"{where}.strict", "must be true or false.")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {"strict": True} if tool.get("strict") else {}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
