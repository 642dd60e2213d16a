"""What binds an answer is decided with the prompt: calls that must or may be made, a form, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowinfer.errors import ModelError, RequestError
from flowinfer.message import Call, Grammar, Sampling, ToolChoice
from flowinfer.stages.recipe_tokenize.stage import RecipeTokenize
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "tests" / "data" / "tiny_chat"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
JSON = Grammar("json", '{"type": "object"}')
REQUIRED = ToolChoice(required=True)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TINY).with_template(TEMPLATE)


def grammar_of(tokenizer: TextTokenizer, *, grammar: Grammar | None = None, **fields: Any) -> Grammar | None:
    context: Any = None
    stage = RecipeTokenize(RecipeTokenize.Config(), context)
    stage.use(tokenizer)
    sampling = Sampling(grammar=grammar, **fields.pop("sampling", {}))
    messages = [{"role": "user", "content": "a"}]
    return stage._prompt(Call(id="a", sampling=sampling, messages=messages, **fields)).sampling.grammar


def test_an_answer_is_free_unless_something_binds_it(tokenizer: TextTokenizer) -> None:
    assert grammar_of(tokenizer) is None
    assert grammar_of(tokenizer, tools=[TOOL]) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": REQUIRED},
        {"tools": [TOOL], "tool_choice": ToolChoice(names=("f",))},
        {"tools": [TOOL], "tool_choice": ToolChoice(parallel=False)},
        {"tools": [STRICT]},
        {"tools": [TOOL], "grammar": JSON},
    ],
)
def test_calls_bind_an_answer(tokenizer: TextTokenizer, fields: Any) -> None:
    grammar = grammar_of(tokenizer, **fields)
    assert grammar is not None and "f" in grammar.text


@pytest.mark.parametrize(
    ("thinks", "asleep", "opens"), [(True, True, False), (False, False, False), (None, True, True)]
)
def test_a_form_waits_for_reasoning_that_is_open_or_may_be(
    tokenizer: TextTokenizer, thinks: bool | None, asleep: bool, opens: bool
) -> None:
    args = {} if thinks is None else {"enable_thinking": thinks}
    grammar = grammar_of(tokenizer, grammar=JSON, template_args=args)
    assert grammar is not None and msgspec.structs.replace(grammar, after=None, opens=None) == JSON
    closing, opening = (tokenizer.vocabulary.full.token_to_id(mark) for mark in ("</think>", "<think>"))
    assert (grammar.after, grammar.opens) == (closing if asleep else None, opening if opens else None)


def test_what_cannot_be_is_refused_by_name(tokenizer: TextTokenizer) -> None:
    bad = {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"not": {}}}}
    for fields, param in (
        ({"tools": [TOOL, bad]}, "tools[1].function.parameters"),
        ({"tools": [TOOL], "tool_choice": REQUIRED, "sampling": {"ignore_eos": True}}, "ignore_eos"),
        ({"grammar": Grammar("regex", "(", "guided_regex")}, "guided_regex"),
    ):
        with pytest.raises(RequestError) as caught:
            grammar_of(tokenizer, **fields)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_settings_of_the_format(tokenizer: TextTokenizer) -> None:
    context: Any = None
    with pytest.raises(ValueError, match="give one of them"):
        RecipeTokenize.Config(template="a.jinja", recipe="deepseek-v4")
    with pytest.raises(ModelError, match=r"deepseek-v4's encoding needs|isn't installed"):
        RecipeTokenize(RecipeTokenize.Config(recipe="deepseek-v4"), context).use(tokenizer)
    stage = RecipeTokenize(RecipeTokenize.Config(template_args={"enable_thinking": True}), context)
    stage.use(tokenizer)
    segments = stage.segments(Call(id="a", sampling=Sampling(), messages=[{"role": "user", "content": "a"}]))
    assert segments[-1].text.endswith("<think>")
