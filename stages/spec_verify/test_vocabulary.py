"""A draft model must mean the same tokens by its ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowinfer.stages.spec_verify.vocabulary import misfit

WORDS = ["a", "b", "c", "d"]


def write(folder: Path, words: list[str] | None, size: int = 6, added: tuple[str, ...] = ("<end>",)) -> str:
    folder.mkdir()
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "rms_norm_eps": 1e-5}
    limits = {"max_position_embeddings": 64, "eos_token_id": 2, "num_key_value_heads": 1, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | named | limits))
    if words is not None:
        special = [{"id": len(words) + i, "content": token} for i, token in enumerate(added)]
        vocabulary = {word: id for id, word in enumerate(words)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": special}))
    return str(folder)


def test_equal_vocabularies_suit(tmp_path: Path) -> None:
    assert misfit(write(tmp_path / "a", WORDS), write(tmp_path / "b", WORDS)) is None


@pytest.mark.parametrize(
    ("words", "size", "added", "said"),
    [
        (["a", "x", "c", "d"], 6, ("<end>",), "has 'x' where the model has 'b' (id 1)"),
        (["a", "b", "c"], 6, (), "has no token where the model has 'd' (id 3)"),
        (WORDS, 6, ("<eos>",), "has '<eos>' where the model has '<end>' (id 4)"),
        (WORDS, 8, ("<end>",), "knows 8 tokens"),
        (None, 7, (), "knows 7 tokens"),
    ],
)
def test_others_are_told_apart(
    tmp_path: Path, words: list[str] | None, size: int, added: tuple[str, ...], said: str
) -> None:
    found = misfit(write(tmp_path / "draft", words, size, added), write(tmp_path / "target", WORDS))
    assert found is not None and said in found[0] and "same tokenizer" in found[1]


def test_nothing_is_said_of_models_that_are_not_here(tmp_path: Path) -> None:
    here, nowhere = write(tmp_path / "here", WORDS), str(tmp_path / "nowhere")
    assert misfit(here, nowhere) is None and misfit(nowhere, here) is None


def test_tokenizers_that_cannot_be_read_leave_the_sizes_to_compare(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", None)
    (tmp_path / "draft" / "tokenizer.json").write_text("[1, 2]")
    assert misfit(draft, write(tmp_path / "target", WORDS)) is None
