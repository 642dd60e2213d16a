"""Tokenizers for the text tests, built here: byte-level BPE, SentencePiece-like BPE with byte fallback, Unigram."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer
from flowinfer.text.vocabulary import Vocabulary

TEMPLATES = Path(__file__).parent / "templates"
TINY = Path(__file__).parents[1] / "data" / "tiny_chat"
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>",
]  # fmt: skip
# Added, but not special.
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
WORDS = "What is the capital of France Paris user system assistant model tool think start end im INST"


def added(first: int) -> list[dict[str, Any]]:
    """The added vocabulary as tokenizer.json lists it."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [(text, True) for text in SPECIAL] + [(text, False) for text in MARKERS]
    return [{"id": first + n, "content": text, "special": special, **plain} for n, (text, special) in enumerate(tokens)]


def word_merges(words: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build each word from the left; new pieces join vocab."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            merge = (word[: end - 1], word[end - 1])
            if merge not in merges:
                merges.append(merge)
                vocab.setdefault(word[:end], len(vocab))
    return merges


def byte_level() -> dict[str, Any]:
    """Byte-level BPE whose model lists `<|im_end|>` and can even merge it from letters, to be as unsafe as can be."""
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = word_merges([*WORDS.split(), *("Ġ" + word for word in WORDS.split()), "<|im_end|>"], vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    # Splits by characters, not words, so that whole markers reach the merges.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\\s+"), "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    entries = added(len(vocab))
    for entry in entries:
        entry["id"] = vocab.get(entry["content"], entry["id"])
    return {**tree, "added_tokens": sorted(entries, key=lambda entry: entry["id"])}


def sentencepiece() -> dict[str, Any]:
    """BPE with ▁ and byte fallback, a space before text that opens a sequence only."""
    vocab = {text: n for n, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    for char in map(chr, [*range(33, 127), 0x2581]):
        vocab[char] = len(vocab)
    merges = word_merges(["▁" + word for word in WORDS.split()], vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    return {**tree, "added_tokens": added(len(vocab))}


def unigram() -> dict[str, Any]:
    """Unigram, whose list of pieces holds the control tokens too and can't lose them."""
    pieces = [("<unk>", 0.0), *((text, -1.0) for text in [*SPECIAL, *MARKERS])]
    pieces += [("▁" + word, -2.0) for word in WORDS.split()]
    pieces += [(chr(code), -9.0) for code in [*range(33, 127), 0x2581, 0xFF5C]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    return {**tree, "added_tokens": added(1)}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {"byte": byte_level, "spm": sentencepiece, "unigram": unigram}
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def build(kind: str, template: str | None = None) -> TextTokenizer:
    templates = {"default": (TEMPLATES / f"{template}.jinja").read_text()} if template else None
    return TextTokenizer(Vocabulary(KINDS[kind]()), templates=templates, config=CONFIG)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., TextTokenizer]:
    """build(kind, template) with kind byte, spm or unigram, and the name of a file in templates/."""
    cache: dict[tuple[str, str | None], TextTokenizer] = {}

    def make(kind: str, template: str | None = None) -> TextTokenizer:
        return cache.setdefault((kind, template), cache.get((kind, template)) or build(kind, template))

    return make


@pytest.fixture(scope="session")
def tiny() -> TextTokenizer:
    """A small chat model's text side, read from its folder."""
    return load_tokenizer(TINY)
