"""Structured output through the whole decode loop on a random model: whatever the model prefers, the text matches."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from decode_loop import Service, prompt, save_random_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flowinfer.message import Failure, Grammar, Prompt
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

CONTEXT = 1024
MERGES = [("{", '"'), ('"', ":"), ("t", "r"), ("u", "e"), ("tr", "ue"), ('"', "}"), ("a", "b"), ("ab", '"'), ("1", "2")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes and a few longer tokens, some of which span parts of the grammar."""
    folder = tmp_path_factory.mktemp("bytes")
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    save_random_llama(folder, len(names) + 5, CONTEXT)  # models know ids that no token has
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def text(model: Path) -> TextTokenizer:
    return load_tokenizer(model)


def asking(text: TextTokenizer, id: str, grammar: Grammar, **sampling: Any) -> Prompt:
    tokens = text.encode_plain(f"{id} " + '{"ab": true, "b": [12, 12], "ab": true} ' * 4)
    return prompt(id, tokens, ignore_eos=False, grammar=grammar, stop_token_ids=(2,), **sampling)


def as_json(schema: object) -> Grammar:
    return Grammar("json", json.dumps(schema), "response_format")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["integer", "boolean", "null", "enum", "string", "pattern", *(["object", "array"] * depth)])
    if kind == "enum":
        return {"enum": rng.sample(["ab", "b", 1, 12, None, True, "é"], 3)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(1, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(ab|12)+x$"])}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.randrange(1, 500)}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randrange(1, 4)}
    if kind == "object":
        names = rng.sample(["ab", "b", "c"], 2)
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}
    return {"type": kind}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_schemas_always_hold_and_drafts_change_no_token(
    model: Path, text: TextTokenizer, temperature: float
) -> None:
    rng = random.Random(int(temperature))
    schemas = {f"r{n}": random_schema(rng) for n in range(24)}
    answers = []
    sources = ({"draft": "none"}, {}, {"draft": "model", "draft_model": str(model), "schedule": "fixed"})
    for verify in sources:
        prompts = [
            asking(text, id, as_json(schema), max_tokens=400, temperature=temperature, seed=3)
            for id, schema in schemas.items()
        ]
        service = Service(model, num_blocks=120, draft="ngram", verify=verify)
        service.send(*prompts)
        answers.append(service.finish(schemas))
        ended = [service.client.ended[id] for id in schemas]
        assert not [end for end in ended if isinstance(end, Failure)]
    assert answers[0] == answers[1] == answers[2]
    drafted, accepted = (sum(getattr(end, f"{what}_tokens") for end in ended) for what in ("drafted", "accepted"))
    assert accepted > 0.9 * drafted > 100  # the model drafts for itself, under the same grammar
    finished = [id for id in schemas if service.client.ended[id].reason == "stop"]
    assert len(finished) >= 20  # a free pattern or white space may use the tokens up
    for id in finished:
        jsonschema.validate(json.loads(text.decode(answers[0][id])), schemas[id])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_begins_where_reasoning_ends_also_inside_a_draft(
    model: Path, text: TextTokenizer, temperature: float
) -> None:
    (end,) = text.encode_plain("x").tolist()
    words = "ab12"
    answers = []
    for draft in ("none", "ngram", "model"):
        service = Service(model, num_blocks=60, draft=draft, verify={"draft_model": str(model)})
        for n in range(6):
            ids = text.encode_plain(f"{n} " + f"think {words} x{words} " * 6)
            grammar = Grammar("regex", "(ab12){2}", after=end)
            options = {"temperature": temperature, "logit_bias": {end: 2.0 if temperature else 6.0}, "seed": n}
            service.send(prompt(f"t{n}", ids, ignore_eos=False, grammar=grammar, max_tokens=300, **options))
        answers.append(service.finish(f"t{n}" for n in range(6)))
    assert answers[0] == answers[1]
    stopped = [id for id in answers[1] if service.client.ended[id].reason == "stop"]
    assert stopped
    for id in stopped:
        _, _, answer = text.decode(answers[1][id]).partition("x")
        assert answer == "ab12ab12"
    assert temperature == 0 or any(len(answers[1][id]) > 9 for id in stopped)  # some thought first


def test_a_model_may_think_of_its_own_accord_before_what_binds_it(model: Path, text: TextTokenizer) -> None:
    (opens,), (closes,) = (text.encode_plain(mark).tolist() for mark in "yx")
    answers = []
    for draft in ("none", "ngram"):
        service = Service(model, num_blocks=60, draft=draft)
        for n in range(8):
            ids = text.encode_plain(f"{n} " + "y think ab12 x ab12ab12 " * 6)
            grammar = Grammar("regex", "(ab12){2}", after=closes, opens=opens)
            options = {"temperature": 1.0, "logit_bias": {opens: 40.0 * (n % 2) - 20.0, closes: 19.0}, "seed": n}
            service.send(prompt(f"t{n}", ids, ignore_eos=False, grammar=grammar, max_tokens=300, **options))
        answers.append(service.finish(f"t{n}" for n in range(8)))
    assert answers[0] == answers[1]
    stopped = {id: text.decode(answers[1][id]) for id in answers[1] if service.client.ended[id].reason == "stop"}
    thought = {id for id, said in stopped.items() if said.startswith("y")}
    assert thought and thought != stopped.keys()
    for said in stopped.values():
        assert said.endswith("ab12ab12") and (said == "ab12ab12" or said[0] == "y")


def test_a_preempted_sequence_goes_on_in_its_grammar(model: Path, text: TextTokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99999, "minimum": 10000}, "minItems": 20}
    ids = [f"p{n}" for n in range(5)]
    answers = []
    for num_blocks in (60, 14):
        service = Service(model, num_blocks=num_blocks)
        service.send(*(asking(text, id, as_json(schema), max_tokens=200) for id in ids))
        answers.append(service.finish(ids))
    assert service.decode.num_preemptions > 0
    assert answers[0] == answers[1]
    for answer in answers[1].values():
        assert re.match(r"\[\s*\d{5}\s*,", text.decode(answer))


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar("regex", "(ab|12){3}é?", "guided_regex"), "(ab|12){3}é?"),
        (Grammar("choice", '["ab", "true \\"x\\"", "12"]', "guided_choice"), 'ab|true "x"|12'),
        (Grammar("lark", 'start: "ab" NUMBER\nNUMBER: /[0-9]{3}/', "guided_grammar"), "ab[0-9]{3}"),
        (Grammar("lark", 'root ::= "ab" digit\ndigit ::= [0-9]', "guided_grammar"), "ab[0-9]"),
    ],
)
def test_other_grammars(model: Path, text: TextTokenizer, grammar: Grammar, matches: str) -> None:
    service = Service(model, num_blocks=20, draft="ngram")
    service.send(asking(text, "one", grammar, temperature=1.0, max_tokens=60))
    assert re.fullmatch(matches, text.decode(service.finish(["one"])["one"]))
    assert service.client.ended["one"].reason == "stop"


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 8},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {2: 100.0, 70: 100.0, 80: -100.0}},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_other_settings_choose_only_within_the_grammar(
    model: Path, text: TextTokenizer, sampling: dict[str, Any]
) -> None:
    """min_tokens keeps ends away only as long as the grammar has anything else to say."""
    service = Service(model, num_blocks=20, draft="ngram")
    service.send(asking(text, "one", Grammar("regex", "ab[0-9]{2,9}"), **sampling))
    answer = text.decode(service.finish(["one"])["one"])
    assert re.fullmatch("ab[0-9]{2,9}", answer)
    service.send(asking(text, "two", Grammar("regex", "ab"), min_tokens=8))
    assert text.decode(service.finish(["two"])["two"]) == "ab"


def test_a_grammar_that_cannot_be_used_fails_its_request_alone(model: Path, text: TextTokenizer) -> None:
    service = Service(model, num_blocks=20)
    service.send(
        asking(text, "bad", Grammar("json", '{"type": "object", "not": {}}', "guided_json")),
        asking(text, "good", Grammar("regex", "ab")),
    )
    answers = service.finish(["bad", "good"])
    failure = service.client.ended["bad"]
    assert (failure.status, failure.code, failure.param) == (400, "invalid_grammar", "guided_json")
    assert "not" in failure.message
    assert text.decode(answers["good"]) == "ab"
    service.turn(2)
    assert service.pool.num_free == 20


def test_a_cancel_while_the_grammar_is_compiled_frees_all(model: Path, text: TextTokenizer) -> None:
    service = Service(model, num_blocks=20)
    service.send(asking(text, "gone", Grammar("regex", "(ab){50}"), max_tokens=100))
    while not service.decode.compiling:
        service.turn()
    service.cancel("gone")
    service.turn(5)
    service.send(asking(text, "next", Grammar("regex", "ab")))
    service.finish(["next"])
    assert service.client.tokens.get("gone") is None
    assert service.pool.num_free == 20
