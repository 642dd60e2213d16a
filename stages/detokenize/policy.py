"""Decides, for one sequence, what text goes out now, where a stop string cuts it, and its last word. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowinfer.message import Finish, Opened, Opening, Piece, TextLogprob
from flowinfer.text.incremental import ByteStream, Glyphs, Match, StopScanner
from flowinfer.text.reply import ReplyParser, open_parser

Step = tuple[list[int], Sequence[TextLogprob], Finish | None]


class Stream:
    """The text of one sequence. `cut` is true once a stop string has ended it, whatever the model still sends."""

    __slots__ = (
        "_bytes",
        "_early",
        "_logprobs",
        "_num_tokens",
        "_opened",
        "_opening",
        "_reply",
        "_scanner",
        "_thought",
        "_tokens",
        "cut",
    )

    def __init__(self, opening: Opening, glyphs: Glyphs, opened: Opened | None = None) -> None:
        """opened: what the first piece says of the prompt."""
        self.cut = False
        self._opened = opened
        self._opening = opening
        self._bytes = ByteStream(glyphs)
        self._scanner = StopScanner(opening.sampling.stop) if any(opening.sampling.stop) else None
        form = opening.sampling.reply
        self._reply: ReplyParser | None = None if form is None else open_parser(form, call_prefix=opening.id)
        self._num_tokens = 0
        self._thought = 0  # tokens of reasoning
        self._tokens: list[int] = []  # taken in, but their text isn't out yet
        self._logprobs: list[TextLogprob] = []
        self._early: dict[int, Step] = {}  # by position: what came ahead of tokens that another worker still owes

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that were taken."""
        return self._num_tokens

    @property
    def waits(self) -> bool:
        """True while later tokens are here than can be taken."""
        return bool(self._early)

    def place(self, position: int, step: Step) -> list[Piece]:
        """Takes a step whose first token has this place in the answer: in order, each token once, whoever gave it.

        A sequence that moved has tokens of two workers under way; those of the new one may come first.
        """
        self._early[position] = step
        pieces = []
        while (at := min(self._early, default=self._num_tokens + 1)) <= self._num_tokens and not self.cut:
            tokens, logprobs, finish = self._early.pop(at)
            known = self._num_tokens - at
            piece = self.advance(tokens[known:], logprobs[known:], finish)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def advance(
        self, tokens: list[int], logprobs: Sequence[TextLogprob] = (), finish: Finish | None = None
    ) -> Piece | None:
        """Takes a step's tokens; gives the text that they set free, None if there's nothing to send yet."""
        rendered = len(tokens) - _ends_unseen(tokens, finish)
        text, stop = self._take(tokens, rendered, logprobs)
        if stop is None and finish is not None:
            rest, stop = self._flush()
            text += self._sorted(rest)
        if stop is not None:
            self.cut = True
            finish = self._finish(finish or Finish(reason="stop"), stop)
        elif finish is not None:
            finish = self._finish(finish, finish.stop)
        piece = Piece(id=self._opening.id, text=text, finish=finish)
        if self._reply is not None:
            _fill(piece, self._reply)
        if not (piece.text or piece.reasoning or piece.calls or finish):
            return None
        piece.tokens, piece.logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], []
        if self._opened is not None:
            piece.opened, self._opened = self._opened, None
        return piece

    def _take(self, tokens: list[int], rendered: int, logprobs: Sequence[TextLogprob]) -> tuple[str, str | None]:
        """New text, and the stop string that ended it. Tokens behind the stop aren't taken."""
        if self._scanner is None and self._reply is None:
            self._num_tokens += len(tokens)
            self._tokens += tokens
            self._logprobs += logprobs
            return "".join([self._bytes.push(token) for token in tokens[:rendered]]), None
        text = ""
        for place, token in enumerate(tokens):
            self._num_tokens += 1
            self._thought += self._reply is not None and self._reply.in_reasoning
            self._tokens.append(token)
            self._logprobs += logprobs[place : place + 1]
            found = self._scan(self._bytes.push(token)) if place < rendered else ""
            if isinstance(found, Match):
                return text + self._sorted(found.text), found.stop
            text += self._sorted(found)
        return text, None

    def _sorted(self, text: str) -> str:
        """The text itself, or none if it's to be taken apart: it has passed the stop strings, which count anywhere."""
        if self._reply is None:
            return text
        self._reply.push(text)
        return ""

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
            reasoning_tokens=self._thought,
        )


def _fill(piece: Piece, reply: ReplyParser) -> None:
    """Puts into a piece what its text was taken apart into."""
    if piece.finish is not None:
        reply.finish()
    delta = reply.delta
    piece.text, piece.reasoning, piece.calls = "".join(delta.text), "".join(delta.reasoning), delta.calls
    delta.clear()


def _ends_unseen(tokens: list[int], finish: Finish | None) -> bool:
    """True if the last token is the stop token that ended the sequence: it isn't part of the text."""
    return finish is not None and finish.reason == "stop" and bool(tokens) and finish.stop == tokens[-1]
