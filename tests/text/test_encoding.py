"""Plain text to ids and back: lossless, free of control tokens, equal to the reference where that has no markers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.errors import ModelError
from flowinfer.text.encoding import Encoder
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer
from flowinfer.text.traced import Segment
from flowinfer.text.vocabulary import Vocabulary

MakeTokenizer = Callable[..., TextTokenizer]
MARKERS = ["<|im_end|>", "<s>", "</s>", "[INST]", "<think>", "<tool_call>", "<｜User｜>", "<unk>", "<|im_end", "|>"]
texts = st.lists(
    st.sampled_from(MARKERS) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=6),
    max_size=6,
).map("".join)
plain_texts = st.text(st.characters(exclude_characters="<>[]|｜", exclude_categories=["Cs"]), max_size=40)
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", ["byte", "spm"])
@relaxed
@given(text=texts)
def test_plain_ids_decode_to_the_text(make_tokenizer: MakeTokenizer, kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode_plain(text)
    assert ids.dtype == np.int32
    # SentencePiece writes the space before a first word itself, so a decode takes one off, the text's own included.
    assert tokenizer.decode(ids) == (text.removeprefix(" ") if kind == "spm" else text)


@pytest.mark.parametrize("kind", ["byte", "spm", "unigram"])
@relaxed
@given(text=texts)
def test_plain_ids_hold_no_control_token(make_tokenizer: MakeTokenizer, kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    unknown = {tokenizer.vocabulary.unknown_id}
    assert not (tokenizer.control_ids - unknown) & set(tokenizer.encode_plain(text).tolist())


@pytest.mark.parametrize("kind", ["byte", "spm", "unigram"])
@relaxed
@given(text=plain_texts)
def test_text_without_markers_has_the_ids_of_the_reference(make_tokenizer: MakeTokenizer, kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    assert tokenizer.encode_plain(text).tolist() == tokenizer.vocabulary.full.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["byte", "spm", "unigram"])
@relaxed
@given(parts=st.lists(plain_texts | st.sampled_from(["<s>", "[INST]", "<think>"]), max_size=6))
def test_an_authors_text_has_the_ids_of_the_reference(
    make_tokenizer: MakeTokenizer, kind: str, parts: list[str]
) -> None:
    tokenizer = make_tokenizer(kind)
    segments = [Segment(part.startswith(("<", "[")), part) for part in parts if part]
    expected = tokenizer.vocabulary.full.encode("".join(parts), add_special_tokens=False).ids
    assert tokenizer.encode_segments(segments).tolist() == expected


def test_white_space_in_the_added_vocabulary_stays_in_use() -> None:
    tree = json.loads((Path(__file__).parents[1] / "data/tiny_chat/tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tree["added_tokens"].append({"id": 510, "content": "    ", **flags})
    vocabulary = Vocabulary(tree)
    ids = Encoder(vocabulary).plain("a    b<think>")
    assert 510 in ids and 510 not in vocabulary.control_ids
    assert 504 not in ids


def test_half_a_surrogate_pair_becomes_a_replacement_character(tiny: TextTokenizer) -> None:
    assert tiny.decode(tiny.encode_plain("a\ud83db")) == "a\ufffdb"


@pytest.mark.parametrize(("add_bos", "opening"), [(None, []), (True, [1]), (False, [])])
def test_bos_of_a_completion_follows_the_configuration(add_bos: bool | None, opening: list[int]) -> None:
    tree = json.loads((Path(__file__).parents[1] / "data/tiny_chat/tokenizer.json").read_text())
    config = {"bos_token": "<|im_start|>", **({} if add_bos is None else {"add_bos_token": add_bos})}
    tokenizer = TextTokenizer(Vocabulary(tree), config=config)
    ids = tokenizer.encode_prompt("Paris").tolist()
    assert ids == opening + tokenizer.encode_plain("Paris").tolist()


def test_bos_of_a_completion_comes_from_the_post_processor() -> None:
    tree = json.loads((Path(__file__).parents[1] / "data/tiny_chat/tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    tokenizer = TextTokenizer(Vocabulary(tree))
    assert tokenizer.encode_prompt("Paris").tolist()[:1] == [1]
    assert 1 not in tokenizer.encode_plain("Paris").tolist()


def test_a_folder_gives_limits_and_ends(tiny: TextTokenizer) -> None:
    assert (tiny.context_length, tiny.vocab_size, tiny.eos_ids) == (256, 510, (2,))
    assert tiny.token_bytes(1) == b"<|im_start|>"
    assert tiny.token_bytes(10_000) == b""
    assert tiny.decode([1, *tiny.encode_plain("hi"), 504, 2]) == "hi<think>"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_markers_by_the_thousand_cost_no_recursion(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("unigram")
    text = "<s>[INST]" * 5_000
    assert not tokenizer.control_ids & set(tokenizer.encode_plain(text).tolist())


def test_any_named_token_of_the_configuration_counts_as_special() -> None:
    tree = json.loads((Path(__file__).parents[1] / "data/tiny_chat/tokenizer.json").read_text())
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "image_token": "<think>",
        "add_bos_token": False,
        "pad_token": None,
    }
    tokenizer = TextTokenizer(Vocabulary(tree), config=config)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "image_token": "<think>"}
    assert tokenizer.eos_ids == (2,)
