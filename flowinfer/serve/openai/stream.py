"""What OpenAI's two kinds of streams have in common: their frames, the usage and the padding that options ask for."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.message import Opened, Piece
from flowinfer.serve.asgi import error_body
from flowinfer.serve.openai.encode import encode
from flowinfer.serve.openai.fields import StreamOptions
from flowinfer.serve.openai.job import KEEP_ALIVE

PAD_TO = 32  # bytes: an obfuscated event's length tells the length of its text to this much only


@dataclass(frozen=True)
class StreamShape:
    """usage: a last chunk tells it.  running: every chunk does.  obfuscated: events are padded at random."""

    usage: bool = False
    running: bool = False
    obfuscated: bool = False

    @classmethod
    def of(cls, options: StreamOptions | None) -> StreamShape:
        if options is None:
            return cls()
        return cls(bool(options.include_usage), bool(options.continuous_usage_stats), bool(options.include_obfuscation))

    @property
    def plain(self) -> bool:
        """Whether chunks of a choice differ in their text alone, so that they can be spliced."""
        return not (self.running or self.obfuscated)


class Chunks:
    """Base of the writers. A stream is kept alive by comments; an error is data, and ends it without [DONE]."""

    def __init__(self, head: dict[str, Any], shape: StreamShape) -> None:
        self._frame_head, self._shape, self._plain = head, shape, shape.plain
        self._spent: dict[int, list[int]] = {}  # tokens of prompt and answer so far, by choice

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def note(self, index: int, piece: Piece) -> None:
        """Counts what a piece brings, for the usage that goes with its chunks."""
        if self._shape.running:
            spent = self._spent.setdefault(index, [0, 0])
            spent[0] = piece.opened.prompt_tokens if piece.opened else spent[0]
            spent[1] = piece.finish.completion_tokens if piece.finish else spent[1] + len(piece.tokens)

    def frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """A chunk. Where usage is asked for, each has the field, null but in the last (or with running usage)."""
        frame = self._frame_head | {"choices": choices}
        if self._shape.running and choices:
            prompt, completion = self._spent.get(choices[0]["index"], (0, 0))
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return frame | {"usage": usage} if self._shape.usage or self._shape.running else frame

    def data(self, frame: dict[str, Any]) -> bytes:
        """The event of a chunk."""
        text = encode(frame)
        if self._shape.obfuscated and frame["choices"]:
            text = encode(frame | {"obfuscation": padding(len(text))})
        return b"data: " + text + b"\n\n"


def padding(length: int) -> str:
    """Random characters that fill JSON of this length, with a field "obfuscation" for them, up to a step of PAD_TO."""
    bare = length + len(',"obfuscation":""')
    return secrets.token_hex(PAD_TO)[: PAD_TO + -bare % PAD_TO]


def opened_of(piece: Piece) -> Opened:
    """What a sequence said of its prompt, in its first piece."""
    return piece.opened or Opened(prompt_tokens=piece.finish.prompt_tokens if piece.finish else 0)
