"""Small stages for pipeline files with mistakes that the built-in stages can't show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from flowinfer.message import Call, Logits, Message, Prompt, Proposal, Sequence, Text, Tokens
from flowinfer.stage import Conflict, Contract, ModelUse, Stage, StageConfig


class Tok(Stage):
    """Calls become prompts."""

    def step(self, calls: list[Call]) -> Iterable[Prompt]: ...


class Pass(Stage):
    """Prompts go through."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Answer(Stage):
    """Prompts become text."""

    def step(self, prompts: list[Prompt]) -> Iterable[Text]: ...


class Watch(Stage):
    """Prompts end here."""

    def step(self, prompts: list[Prompt]) -> None: ...


class Fork(Stage):
    """Gives two types that the same input takes."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt | Sequence]: ...


class Merge(Stage):
    """Takes prompts at two inputs."""

    def step(self, first: list[Prompt], second: list[Prompt]) -> Iterable[Prompt]: ...


class Relay(Stage):
    """Sequences go through."""

    def step(self, sequences: list[Sequence]) -> Iterable[Sequence]: ...


class Careless(Stage):
    """Adds the facet bucket without naming the buckets."""

    class Config(StageConfig):
        def contract(self) -> Contract:
            return Contract(adds=frozenset({"bucket"}))

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Mode(Stage):
    """Two of them must not run in different modes."""

    class Config(StageConfig):
        mode: Literal["exact", "loose"] = "exact"

        def contract(self) -> Contract:
            conflict = Conflict("mode", "spec-verify", "draft", ("ngram",), "Write `draft: none` there.")
            return Contract(conflicts=(conflict,) if self.mode == "exact" else ())

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Needy(Stage):
    """Has a setting without a default."""

    class Config(StageConfig):
        path: str

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Disk(StageConfig):
    """Settings inside of settings."""

    path: str = "kv"


class Nested(Stage):
    """Has a setting that is a map, or a word."""

    class Config(StageConfig):
        disk: Disk | Literal["none"] = "none"

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Untyped(Stage):
    """Doesn't say what it takes."""

    def step(self, prompts):  # type: ignore[no-untyped-def]
        return prompts


class Neighbour(Stage):
    """Works only beside a watch."""

    class Config(StageConfig):
        def contract(self) -> Contract:
            return Contract(beside=frozenset({"detokenize"}))

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Weights(Stage):
    """Loads a model for prompts that carry no keys and values."""

    class Config(StageConfig):
        model: str = "smollm2-135m"
        dtype: Literal["float32", "bfloat16"] = "float32"

        def contract(self) -> Contract:
            return Contract(model=ModelUse(self.model, weights=True, dtype=self.dtype))

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]: ...


class Loop(Stage):
    """Tokens come back as proposals."""

    def step(self, tokens: list[Tokens]) -> Iterable[Proposal]: ...


class Local(Stage):
    """Prompts become logits in device memory."""

    def step(self, prompts: list[Prompt]) -> Iterable[Logits]: ...


class Read(Stage):
    """Logits become text."""

    def step(self, logits: list[Logits]) -> Iterable[Text]: ...


class OtherTok(Tok):
    """Another way from calls to prompts."""


class Note(Message):
    """A message of a request that can't carry an arm."""

    id: str


class Write(Stage):
    """Calls become notes."""

    def step(self, calls: list[Call]) -> Iterable[Note]: ...


class Copy(Stage):
    """Notes go through."""

    def step(self, notes: list[Note]) -> Iterable[Note]: ...


class ReadNotes(Stage):
    """Notes become text."""

    def step(self, notes: list[Note]) -> Iterable[Text]: ...


class OtherRead(ReadNotes):
    """Another way from notes to text."""
