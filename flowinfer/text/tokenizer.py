"""A model's text side, from its Hugging Face folder: encode, render, decode. Leaves streams to incremental."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowinfer.errors import ModelError, RequestError
from flowinfer.message import Ids
from flowinfer.text.deepseek import RECIPE_OF, DeepSeekRecipe, RecipeName
from flowinfer.text.encoding import Encoder, Part
from flowinfer.text.incremental import Glyphs, strip_opening
from flowinfer.text.selftest import check_template
from flowinfer.text.template import ChatFormat, ChatTemplate, Messages, Tools
from flowinfer.text.traced import Segment
from flowinfer.text.vocabulary import Vocabulary

_NO_LIMIT = 2**31 - 1


class TextTokenizer:
    """Text to ids and back for one model.

    control_ids: ids that only the template may write.  eos_ids: ids that end a generation.  vocab_size: ids of the
    model, which may exceed the tokenizer's.  context_length: tokens of prompt and answer together.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        eos_ids: Iterable[int] = (),
        context_length: int = _NO_LIMIT,
        vocab_size: int | None = None,
    ) -> None:
        config = config or {}
        self.vocabulary = vocabulary
        self.control_ids = vocabulary.control_ids
        self.context_length = context_length
        self.vocab_size = vocab_size or vocabulary.size
        self.special_tokens = _special_tokens(config)
        self.eos_ids = tuple(sorted({*eos_ids, *self._ids_of("eos_token")}))
        self._encoder = Encoder(vocabulary)
        self._bos = self._opening_ids(config.get("add_bos_token"))
        self._bytes = vocabulary.token_bytes()
        self._longest = max(1, *map(len, self._bytes))
        self.templates: dict[str, ChatFormat] = {
            name: ChatTemplate(text, self.special_tokens) for name, text in (templates or {}).items()
        }
        self.recipe: RecipeName | None = None  # the model's own, for one that brings no template

    def encode_plain(self, text: str) -> Ids:
        """Ids, int32 [tokens], of text in which nothing is a marker; no BOS."""
        return np.array(self._encoder.plain(text), dtype=np.int32)

    def encode_prompt(self, text: str) -> Ids:
        """Ids of a completion's prompt: the BOS that the tokenizer's configuration asks for, then plain text."""
        return np.array(self._bos + self._encoder.plain(text, first=not self._bos), dtype=np.int32)

    def encode_segments(self, segments: Iterable[Segment]) -> Ids:
        """Ids, int32 [tokens], of a rendered conversation."""
        return self._encoder.segments(segments)

    def marked(self, text: str) -> tuple[Part, ...]:
        """Text as a template's author would write it: ids of control tokens, and the text between them."""
        return self._encoder.markers(text)

    def render(self, messages: Messages, tools: Tools | None = None, /, **arguments: Any) -> list[Segment]:
        """The conversation in the model's format. Raises RequestError (400) where the template refuses it."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self.templates.get(name)
        if template is None:
            message = "This model has no chat template: use /v1/completions, or set `template` of recipe-tokenize."
            raise RequestError(400, message, code="no_chat_template", param="messages")
        return template.render(messages, tools, **arguments)

    @property
    def shows_form(self) -> bool:
        """Whether `render` takes the `form` of an answer, to tell the model."""
        return any(isinstance(template, DeepSeekRecipe) for template in self.templates.values())

    def with_template(self, source: str) -> TextTokenizer:
        """The same tokenizer with this chat template instead of the model's. Raises ModelError on a syntax mistake."""
        other = copy.copy(self)
        other.templates = {"default": ChatTemplate(source, self.special_tokens)}
        return other

    def with_recipe(self, name: RecipeName) -> TextTokenizer:
        """The same tokenizer with this encoding of chats instead of the model's template."""
        other = copy.copy(self)
        other.templates = {"default": DeepSeekRecipe(name)}
        return other

    def glyphs(self, shown: Collection[str] = ()) -> Glyphs:
        """The tables that streams of this model share. Special tokens give no text, but for those that hold `shown`."""
        special, added = self.vocabulary.special_ids, self.vocabulary.added
        hidden = frozenset(index for index in special if not any(added[index] in text for text in shown))
        return Glyphs(self._bytes, hidden=hidden, opening_strip=self.vocabulary.opening_strip())

    def check_templates(self) -> None:
        """Renders benign conversations and compares with plain Jinja and plain encoding. Raises ModelError."""
        for name, template in self.templates.items():
            if isinstance(template, ChatTemplate):
                check_template(template, self._encoder, self.vocabulary, name)
            elif isinstance(template, DeepSeekRecipe):
                template.check(self._encoder)

    def min_tokens(self, num_chars: int) -> int:
        """A number of tokens that so much text surely has: what is hopelessly long needn't be tokenized to know it."""
        return 0 if self.vocabulary.shrinks else num_chars // self._longest

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids as a whole; special tokens aren't shown, bytes that are no UTF-8 become U+FFFD."""
        shown = [index for index in map(int, ids) if index not in self.vocabulary.special_ids]
        parts = [data for index in shown if (data := self.token_bytes(index))]
        if parts:
            parts[0] = strip_opening(parts[0], self.vocabulary.opening_strip())
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, index: int) -> bytes:
        """The token's bytes, which may be half a character; special tokens as written, unknown ids none."""
        return self._bytes[index] if 0 <= index < len(self._bytes) else b""

    def _ids_of(self, name: str) -> list[int]:
        text = self.special_tokens.get(name)
        index = self.vocabulary.full.token_to_id(text) if text else None
        return [] if index is None else [index]

    def _opening_ids(self, add_bos: bool | None) -> list[int]:
        bare = self.vocabulary.full.encode("a", add_special_tokens=False).ids
        dressed = self.vocabulary.full.encode("a", add_special_tokens=True).ids
        fits = (n for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare)
        opening = dressed[: next(fits, 0)]
        if add_bos is False:
            return []
        return opening or (self._ids_of("bos_token") if add_bos else [])


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Reads tokenizer, templates and limits of a Hugging Face folder. Raises ModelError naming the file at fault."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a worker has its share of cores already
    config, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    model = {**model, **(model.get("text_config") or {})}
    limits = [model.get("max_position_embeddings"), config.get("model_max_length")]
    tokenizer = TextTokenizer(
        Vocabulary.load(folder),
        templates=_templates(folder, config),
        config=config,
        eos_ids=_eos(_read(folder / "generation_config.json"), model),
        context_length=min([int(limit) for limit in limits if limit and limit < _NO_LIMIT], default=_NO_LIMIT),
        vocab_size=model.get("vocab_size"),
    )
    tokenizer.recipe = RECIPE_OF.get(str(model.get("model_type")))
    return tokenizer


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} isn't JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return found


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = config.get("chat_template")
    found = {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else {}
    found |= {"default": given} if isinstance(given, str) else {}
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    return found


def _eos(generation: Mapping[str, Any], model: Mapping[str, Any]) -> list[int]:
    ids = generation.get("eos_token_id", model.get("eos_token_id"))
    return [] if ids is None else [int(index) for index in (ids if isinstance(ids, list) else [ids])]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and others by name; each is text, or an object that holds it."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
