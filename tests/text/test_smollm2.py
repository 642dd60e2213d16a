"""SmolLM2's own tokenizer against ids of an independent reference, and streams over its whole vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from flowinfer.engine.hub import resolve
from flowinfer.errors import ModelError
from flowinfer.text.incremental import ByteStream
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer

pytestmark = pytest.mark.model
# Prompts, their ids and greedy answers of SmolLM2-135M-Instruct by transformers 5.24, f32.
ANSWERS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_answers.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> TextTokenizer:
    try:
        return load_tokenizer(resolve("smollm2-135m"))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("question", ANSWERS)
def test_chats_have_the_known_ids(smollm2: TextTokenizer, question: str) -> None:
    ids = smollm2.encode_segments(smollm2.render([{"role": "user", "content": question}]))
    assert ids.tolist() == ANSWERS[question]["prompt_ids"]


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_have_the_known_text(smollm2: TextTokenizer, question: str) -> None:
    assert smollm2.decode(ANSWERS[question]["ids"]) == ANSWERS[question]["text"]


def test_the_template_passes_its_self_test(smollm2: TextTokenizer) -> None:
    smollm2.check_templates()
    assert (smollm2.eos_ids, smollm2.context_length) == ((2,), 8192)


def test_any_special_string_of_the_vocabulary_stays_text(smollm2: TextTokenizer) -> None:
    for text in smollm2.vocabulary.added.values():
        ids = smollm2.encode_plain(f"a{text}{text[:4]}{text}")
        assert not smollm2.control_ids & set(ids.tolist())
        assert smollm2.decode(ids) == f"a{text}{text[:4]}{text}"


def test_random_ids_stream_to_the_reference_decode(smollm2: TextTokenizer) -> None:
    random_ = random.Random(1)
    glyphs = smollm2.glyphs()
    for _ in range(50):
        ids = random_.choices(range(smollm2.vocab_size), k=200)
        stream = ByteStream(glyphs)
        text = "".join([stream.push(index) for index in ids]) + stream.flush()
        assert text == smollm2.vocabulary.full.decode(ids, skip_special_tokens=True)
