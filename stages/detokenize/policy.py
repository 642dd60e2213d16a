"""Decides, for one sequence, what text goes out now, where a stop string cuts it, and its last word. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowinfer.message import Finish, Opening, Piece, TextLogprob
from flowinfer.text.incremental import ByteStream, Glyphs, Match, StopScanner


class Stream:
    """The text of one sequence. `cut` is true once a stop string has ended it, whatever the model still sends."""

    __slots__ = ("_bytes", "_logprobs", "_num_tokens", "_opening", "_scanner", "_tokens", "cut")

    def __init__(self, opening: Opening, glyphs: Glyphs) -> None:
        self.cut = False
        self._opening = opening
        self._bytes = ByteStream(glyphs)
        self._scanner = StopScanner(opening.sampling.stop) if any(opening.sampling.stop) else None
        self._num_tokens = 0
        self._tokens: list[int] = []  # taken in, but their text isn't out yet
        self._logprobs: list[TextLogprob] = []

    def advance(
        self, tokens: list[int], logprobs: Sequence[TextLogprob] = (), finish: Finish | None = None
    ) -> Piece | None:
        """Takes a step's tokens; gives the text that they set free, None if there's nothing to send yet."""
        rendered = len(tokens) - _ends_unseen(tokens, finish)
        text, stop = self._take(tokens, rendered, logprobs)
        if stop is None and finish is not None:
            rest, stop = self._flush()
            text += rest
        if stop is not None:
            self.cut = True
            finish = self._finish(finish or Finish(reason="stop"), stop)
        elif finish is not None:
            finish = self._finish(finish, finish.stop)
        if not text and finish is None:
            return None
        piece = Piece(id=self._opening.id, text=text, tokens=self._tokens, logprobs=self._logprobs, finish=finish)
        self._tokens, self._logprobs = [], []
        return piece

    def _take(self, tokens: list[int], rendered: int, logprobs: Sequence[TextLogprob]) -> tuple[str, str | None]:
        """New text, and the stop string that ended it. Tokens behind the stop aren't taken."""
        if self._scanner is None:
            self._num_tokens += len(tokens)
            self._tokens += tokens
            self._logprobs += logprobs
            return "".join([self._bytes.push(token) for token in tokens[:rendered]]), None
        text = ""
        for place, token in enumerate(tokens):
            self._num_tokens += 1
            self._tokens.append(token)
            self._logprobs += logprobs[place : place + 1]
            found = self._scan(self._bytes.push(token)) if place < rendered else ""
            if isinstance(found, Match):
                return text + found.text, found.stop
            text += found
        return text, None

    def _scan(self, text: str) -> str | Match:
        armed = self._num_tokens >= self._opening.sampling.min_tokens
        return text if self._scanner is None else self._scanner.push(text, armed=armed)

    def _flush(self) -> tuple[str, str | None]:
        """The end of the text: half characters become U+FFFD, and what was held back is free."""
        found = self._scan(self._bytes.flush())
        if isinstance(found, Match):
            return found.text, found.stop
        return found + (self._scanner.flush() if self._scanner else ""), None

    def _finish(self, finish: Finish, stop: str | int | None) -> Finish:
        """The last word, with what the sequence's opening and this stream know of its usage."""
        return msgspec.structs.replace(
            finish,
            reason="stop" if self.cut else finish.reason,
            stop=stop,
            prompt_tokens=self._opening.prompt_tokens,
            cached_tokens=finish.cached_tokens or self._opening.cached_tokens,
            completion_tokens=self._num_tokens,
        )


def _ends_unseen(tokens: list[int], finish: Finish | None) -> bool:
    """True if the last token is the stop token that ended the sequence: it isn't part of the text."""
    return finish is not None and finish.reason == "stop" and bool(tokens) and finish.stop == tokens[-1]
