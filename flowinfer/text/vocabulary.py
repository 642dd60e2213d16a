"""Reads tokenizer.json: a tokenizer that knows the control tokens, one that can't give them, each token's bytes.

The second is the same file less its added vocabulary, and less the control tokens' entries and merges in the model, so
that plain text can't reach them even where the model's vocabulary lists them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flowinfer.errors import ModelError

_SPACE = "▁"  # SentencePiece writes a space so
Tree = dict[str, Any]


class Vocabulary:
    """The tokens of one tokenizer.json.

    control_ids: added tokens, special or not, but for those of white space only, which just shorten text.
    special_ids: control tokens that are flagged special; a detokenizer doesn't show them.
    """

    def __init__(self, tree: Tree) -> None:
        tree = {**tree, "truncation": None, "padding": None}
        self.full = Tokenizer.from_str(json.dumps(tree))
        added = [{**token, "id": self.full.token_to_id(token["content"])} for token in tree.get("added_tokens") or []]
        control = [token for token in added if is_control(token)]
        self.control_ids = frozenset(int(token["id"]) for token in control)
        self.special_ids = frozenset(int(token["id"]) for token in added if token["special"])
        self.added = {int(token["id"]): str(token["content"]) for token in added}
        plain = _without({**tree, "added_tokens": added}, control)
        self.first = Tokenizer.from_str(json.dumps(plain))  # for text that opens a sequence
        inner = _without_prefix_space(plain)  # for text behind something else
        self.inner = self.first if inner == plain else Tokenizer.from_str(json.dumps(inner))
        self.unknown_id = _unknown_id(tree, self.full)
        self.size = 1 + max(self.full.get_vocab(with_added_tokens=True).values())
        self._decoder = _decoder_steps(tree)
        self.shrinks = not _kinds(tree.get("normalizer")) <= {"Sequence", "Prepend", "Replace"}  # text, before tokens

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Reads folder/tokenizer.json. Raises ModelError where it's missing or can't be read."""
        path = folder / "tokenizer.json"
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise ModelError(
                f"{path} is missing.", help="Pull the model again, or point at a Hugging Face folder."
            ) from error
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{path} can't be read as a tokenizer: {error}") from error

    def token_bytes(self) -> list[bytes]:
        """UTF-8 bytes of every id, special tokens as written; an id without a token gives none.

        Raises ModelError where the tokenizer's decoder is neither byte-level BPE nor SentencePiece.
        """
        kinds = {step["type"] for step in self._decoder}
        if "ByteLevel" in kinds:
            to_bytes = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _sentencepiece
        else:
            raise ModelError(f"A tokenizer whose decoder is {sorted(kinds) or 'missing'} can't be streamed by bytes.")
        table = [b""] * self.size
        for text, index in self.full.get_vocab(with_added_tokens=True).items():
            table[index] = to_bytes(text)
        for index, text in self.added.items():
            table[index] = text.encode()
        return table

    def opening_strip(self) -> int:
        """How many leading spaces a full decode takes off its first token: 0, 1, or -1 for all."""
        for step in self._decoder:
            if step["type"] == "Strip" and step.get("content") == " ":
                return int(step["start"])
            if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                return -1
        return 0


def is_control(token: Tree) -> bool:
    """True for an added token that is more than white space, or that is flagged special."""
    return bool(token["special"] or str(token["content"]).replace(_SPACE, " ").strip())


def _without(tree: Tree, control: Sequence[Tree]) -> Tree:
    kept = [token for token in tree.get("added_tokens") or [] if not is_control(token)]
    model = dict(tree["model"])
    if isinstance(model.get("vocab"), dict):
        names = {token["content"] for token in control} - {model.get("unk_token")}
        model["vocab"] = {text: index for text, index in model["vocab"].items() if text not in names}
        model["vocab"] |= {token["content"]: token["id"] for token in kept}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    return {**tree, "added_tokens": kept, "model": model, "post_processor": None}


def _touches(merge: str | Sequence[str], names: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _without_prefix_space(node: Any) -> Any:
    """The tree with Metaspace's "first" (a space before text that opens a sequence) turned off."""
    if isinstance(node, list):
        return [_without_prefix_space(child) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
        return {**node, "prepend_scheme": "never"}
    return {key: child if key == "model" else _without_prefix_space(child) for key, child in node.items()}


def _unknown_id(tree: Tree, full: Tokenizer) -> int | None:
    model = tree["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    unknown = model.get("unk_token")
    return full.token_to_id(unknown) if unknown else None


def _kinds(node: Any) -> set[str]:
    """Types of a component and of all within it."""
    if isinstance(node, list):
        return set().union(*map(_kinds, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    inner = set().union(*map(_kinds, node.values()))
    return inner | {node["type"]} if "type" in node else inner


def _decoder_steps(tree: Tree) -> list[Tree]:
    decoder = tree.get("decoder") or {}
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder] if decoder else []


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, by character."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE, " ").encode()
