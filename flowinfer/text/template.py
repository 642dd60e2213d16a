"""Renders any Jinja chat template into control and plain segments. Knows nothing of tokens.

The template's syntax tree is changed before it is compiled: its text and its string constants become `Traced` strings,
and `~` a join that keeps their spans. Values from a request stay plain. So who wrote a character is known from where it
came, and no rendered string is ever searched for markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from flowinfer.errors import ModelError, RequestError
from flowinfer.text.reply.formats import reasoning_format_of, tool_format_of
from flowinfer.text.traced import Segment, Traced, join_traced, segments_of

# A role of this list is one of a few words, not free text: templates build markers of it, as in '<|' + role + '|>'.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
# What templates call the switch of reasoning: a word for how much, or a flag.
EFFORT, FLAGS = "reasoning_effort", ("enable_thinking", "thinking")
SWITCHES = (EFFORT, *FLAGS)
TRACED_FILTERS = frozenset(
    {"trim", "join", "replace", "upper", "lower", "capitalize", "string", "default", "d", "safe", "format"}
)
_TRACED_METHODS = frozenset(Traced.__dict__) | {"startswith", "endswith", "find", "count", "format"}
_SLOT = re.compile(r"\{\{|\}\}|\{\}")
# What a template can run into over odd values of a request.
RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TemplateRefusal(jinja2.TemplateError):
    """What the template itself says by raise_exception."""


def switches_of(source: str) -> frozenset[str]:
    """The switches of reasoning that a template knows."""
    return frozenset(name for name in SWITCHES if re.search(rf"\b{name}\b", source))


class ChatFormat(Protocol):
    """How a model is told a chat, and how it answers.

    tools, reasoning: names of the formats that it writes, "" for none.  switches: arguments that turn thinking on.
    """

    tools: str
    reasoning: str
    switches: frozenset[str]

    def render(
        self, messages: Messages, tools: Tools | None = None, /, *, add_generation_prompt: bool = True, **arguments: Any
    ) -> list[Segment]:
        """The conversation as segments. Raises RequestError (400) where the format refuses it."""


class ChatTemplate:
    """A compiled chat template. variables: special tokens by name (bos_token, …), which count as the author's."""

    def __init__(
        self, source: str, variables: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._now = now
        self.tools, self.reasoning = tool_format_of(source), reasoning_format_of(source)
        self.switches = switches_of(source)
        self._environment = environment(now)
        self._template = _compile(source, TracingEnvironment(self._environment))

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> list[Segment]:
        """The conversation as segments. Raises RequestError (400) with the template's own words where it refuses.

        continue_final_message: the last message is the beginning of the answer, so nothing is written behind it.
        """
        reserved = _RESERVED | self._variables.keys() | self._environment.globals.keys()
        taken = [name for name in arguments if name in reserved]
        if taken:
            raise RequestError(400, f"{taken[0]!r} can't be set for a chat template.", param="chat_template_kwargs")
        values = {**arguments, "add_generation_prompt": add_generation_prompt and not continue_final_message}
        values |= {name: Traced.author(text) for name, text in self._variables.items()}
        try:
            text = self._template.render(values, messages=_with_roles(messages), tools=tools)
            return segments_of(_up_to(text, messages[-1]) if continue_final_message else text)
        except TemplateRefusal as error:
            raise RequestError(
                400, f"The chat template refuses: {error}", code="chat_template", param="messages"
            ) from error
        except RENDER_ERRORS as error:
            message = f"The chat template can't render this conversation: {error}"
            raise RequestError(400, message, code="chat_template", param="messages") from error

    def render_untraced(self, messages: Messages, tools: Tools | None = None, /, **arguments: Any) -> str:
        """What plain Jinja makes of it: the yardstick of the self-test. Raises jinja2.TemplateError."""
        template = self._environment.from_string(self.source)
        return template.render(
            {"add_generation_prompt": True, **arguments, **self._variables}, messages=messages, tools=tools
        )

    def untraced_features(self) -> list[str]:
        """Names of filters and methods in the template whose results count as plain text."""
        tree = self._environment.parse(self.source)
        filters = {f"|{node.name}" for node in tree.find_all(nodes.Filter) if node.name not in TRACED_FILTERS}
        called = {call.node.attr for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)}
        untraced = {name for name in called if hasattr(str, name) and name not in _TRACED_METHODS}
        return sorted(filters | {f".{name}()" for name in untraced})


def _up_to(text: str, message: Mapping[str, Any]) -> str:
    """The prompt up to where its last message's own text ends. Raises TemplateRefusal where it isn't to be found."""
    content = str(message.get("content") or "").rstrip()
    end = text.rfind(content) if content else -1
    if end < 0:
        raise TemplateRefusal("it shows no text of the last message that could be continued")
    return text[: end + len(content)]


_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "self", "loop", "caller", "varargs", "kwargs"})


def _with_roles(messages: Messages) -> list[dict[str, Any]]:
    known = [{**message} for message in messages]
    for message in known:
        role = message.get("role")
        if isinstance(role, str) and role in ROLES:
            message["role"] = Traced.author(str.__str__(role))
    return known


class _Generation(Extension):
    """`{% generation %}` marks what to train on; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` as templates may call it, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The sandbox that Hugging Face templates are written for."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    _furnish(env, now)
    return env


def _furnish(env: jinja2.Environment, now: Callable[[], datetime]) -> None:
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda format: now().strftime(format)
    env.globals["dict"] = _Dict()


def _refuse(message: str) -> None:
    raise TemplateRefusal(str.__str__(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose joins keep spans; the template's strings hang on it as attributes `author_0`, `author_1`, …"""

    concat = staticmethod(join_traced)

    def __init__(self, base: ImmutableSandboxedEnvironment) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters |= base.filters
        self.globals |= base.globals
        self.filters |= {"join": _join, "safe": _safe, "traced_concat": _concat}

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(text, Traced) or {"{", "}"} & set(_SLOT.sub("", text)):
            return wrapped  # slots with names, numbers or formats: the result is plain
        return lambda *args, **kwargs: text.fill(_SLOT, args)


def _safe(value: Any) -> Any:
    return value  # no autoescape here, so nothing to be safe from; Markup would forget the spans


def _concat(values: Iterable[Any]) -> str:
    return join_traced([str(value) for value in values])


@jinja2.pass_environment
def _join(env: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(env, attribute), value)
    return Traced(d, d.spans if isinstance(d, Traced) else ()).join([str(item) for item in value])


class _Tracer(NodeTransformer):
    """Puts the author's strings on the environment, where compiled code reads them as Traced objects."""

    def __init__(self, env: TracingEnvironment) -> None:
        self._env = env
        self._names: dict[str, str] = {}

    def _author(self, text: str) -> nodes.EnvironmentAttribute:
        name = self._names.setdefault(text, f"author_{len(self._names)}")
        setattr(self._env, name, Traced.author(text))
        return nodes.EnvironmentAttribute(name)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._author(node.data)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self._author(node.value) if isinstance(node.value, str) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List([self.visit(part) for part in node.nodes])
        return nodes.Filter(parts, "traced_concat", [], [], None, None)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # a constant key is looked up, never shown
            node.arg = self.visit(node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        if not isinstance(node.expr, nodes.Const):
            node.expr = self.visit(node.expr)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = self.visit(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node.value = self.visit(node.value)
        return node


def _compile(source: str, env: TracingEnvironment) -> jinja2.Template:
    try:
        tree = env.parse(source)
        banned = next(tree.find_all((nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)), None)
        if banned is not None:
            raise ModelError(
                f"The chat template loads another template in line {banned.lineno}, which isn't supported."
            )
        tree = _Tracer(env).visit(tree)
        nodes.Node.set_environment(tree, env)
        for node in tree.find_all(nodes.Expr):
            node.lineno = node.lineno or 1
        return jinja2.Template.from_code(env, env.compile(tree), dict(env.globals))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"The chat template has a mistake in line {error.lineno}: {error.message}") from error
