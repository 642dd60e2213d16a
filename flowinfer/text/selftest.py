"""Checks a chat template on harmless conversations before it serves any: Jinja's own text, the reference's ids."""

from __future__ import annotations

import logging

from flowinfer.errors import ModelError, RequestError
from flowinfer.text.encoding import Encoder
from flowinfer.text.template import RENDER_ERRORS, ChatTemplate, Messages, Tools
from flowinfer.text.vocabulary import Vocabulary

_USER = {"role": "user", "content": "What is the capital of France?"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ANSWER = {"role": "assistant", "content": "Paris, of course."}
CONVERSATIONS: tuple[Messages, ...] = ((_USER,), (_SYSTEM, _USER), (_USER, _ANSWER, _USER))


_TOOL = {"type": "function", "function": {"name": "clock", "description": "Tells the time.", "parameters": {}}}
_CALL = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Paris"}}}
_TOOL_CHAT: Messages = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "clock", "content": "noon"},
)
log = logging.getLogger(__name__)


def check_template(template: ChatTemplate, encoder: Encoder, vocabulary: Vocabulary, name: str = "default") -> None:
    """Raises ModelError naming the marker that lost its origin and the features that may have lost it."""
    rendered = 0
    for messages in CONVERSATIONS:
        for prompted in (True, False):
            rendered += _check(template, encoder, vocabulary, messages, None, prompted, name)
    if not rendered:
        raise ModelError(f"The chat template {name!r} can't render a single message of a user.")
    try:
        _check(template, encoder, vocabulary, _TOOL_CHAT, [_TOOL], True, name)
    except ModelError as error:  # not all services offer tools: their chats stay safe, if worse
        log.warning("With tools: %s", error)


def _check(
    template: ChatTemplate,
    encoder: Encoder,
    vocabulary: Vocabulary,
    messages: Messages,
    tools: Tools | None,
    prompted: bool,
    name: str,
) -> bool:
    try:
        wanted = template.render_untraced(messages, tools, add_generation_prompt=prompted)
    except RENDER_ERRORS:
        return False  # many formats know no system role
    try:
        segments = template.render(messages, tools, add_generation_prompt=prompted)
    except RequestError as error:
        raise ModelError(f"The chat template {name!r} can't be followed: {error}", help=_suspects(template)) from error
    if "".join(segment.text for segment in segments) != wanted:
        raise ModelError(f"The chat template {name!r} renders differently when followed.", help=_suspects(template))
    expected = vocabulary.full.encode(wanted, add_special_tokens=False).ids
    if (got := encoder.segments(segments).tolist()) != expected:
        lost = next((index for index in expected if index in vocabulary.control_ids and index not in got), None)
        what = f"builds the marker {vocabulary.added[lost]!r} from pieces" if lost is not None else "gives other ids"
        raise ModelError(
            f"The chat template {name!r} {what}, so that user text can't be kept apart from markers.",
            help=_suspects(template),
        )
    return True


def _suspects(template: ChatTemplate) -> str:
    features = template.untraced_features()
    return (
        f"It uses {', '.join(features)}. " if features else ""
    ) + "Set `template` of recipe-tokenize to another one."
