"""Turns tokens into text, a step of all sequences at a time. What text may go out is decided in policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from flowinfer.message import (
    Ended,
    Event,
    Message,
    Opened,
    Opening,
    Piece,
    PromptToken,
    ReplyFormat,
    Text,
    TextLogprob,
    TokenLogprob,
    Tokens,
)
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.detokenize.policy import Stream
from flowinfer.text.reply import markers_of

if TYPE_CHECKING:
    from flowinfer.text.incremental import Glyphs
    from flowinfer.text.tokenizer import TextTokenizer


class Detokenize(Stage):
    """Streams whole characters and cuts at stop strings, whose last piece makes the gateway cancel the work."""

    class Config(StageConfig):
        model: str = setting("", change="cold")

        def contract(self) -> Contract:
            return Contract(model=ModelUse(self.model))

    config: Config
    listens = (Ended,)

    def open(self) -> None:
        from flowinfer.engine.hub import resolve
        from flowinfer.text.tokenizer import load_tokenizer

        folder = resolve(self.config.model)
        self.use(self.ctx.shared(("tokenizer", str(folder)), lambda: load_tokenizer(folder), arms=True))

    def use(self, tokenizer: TextTokenizer) -> None:
        """Works with this tokenizer."""
        self._tokenizer = tokenizer
        self._glyphs = tokenizer.glyphs()
        self._marked: dict[frozenset[str], Glyphs] = {}  # by the markers that are shown
        self._streams: dict[str, Stream] = {}

    def step(self, tokens: list[Tokens]) -> Iterable[Text]:
        return [text for batch in tokens if (text := self._text(batch)).pieces]

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            self._streams.pop(request, None)

    def observe(self, event: Event) -> Iterable[Message] | None:
        if isinstance(event, Ended):
            self.cancel(event.ids)
        return None

    @property
    def num_open(self) -> int:
        """Sequences whose text isn't at its end."""
        return len(self._streams)

    def _text(self, batch: Tokens) -> Text:
        streams = self._streams
        for opening in batch.opened:
            streams[opening.id] = Stream(opening, self._glyphs_for(opening.sampling.reply), self._opened(opening))
        pieces: list[Piece] = []
        flat, at = batch.tokens.tolist(), 0
        for row, (request, count) in enumerate(zip(batch.ids, batch.counts.tolist(), strict=True)):
            start, at = at, at + count
            stream = streams.get(request)
            if stream is None:
                continue  # it was cut or cancelled, and the model had a step in flight
            logprobs = [self._logprob(entry) for entry in batch.logprobs[row]] if row in batch.logprobs else ()
            finish = batch.finished.get(row)
            piece = stream.advance(flat[start:at], logprobs, finish)
            if piece is not None:
                pieces.append(piece)
                if piece.finish is not None:
                    del streams[request]
        return Text(step=batch.step, pieces=pieces)

    def _opened(self, opening: Opening) -> Opened:
        prompt: list[PromptToken] = []
        if opening.sampling.prompt_logprobs is not None:
            prompt = [PromptToken(opening.first_token, *self._shown(opening.first_token), None)]
            prompt += map(self._scored, opening.prompt_logprobs)
        return Opened(
            prompt_tokens=opening.prompt_tokens,
            cached_tokens=opening.cached_tokens,
            stored_tokens=opening.stored_tokens,
            prompt=prompt,
        )

    def _scored(self, entry: TokenLogprob) -> PromptToken:
        top = [(token, self._shown(token)[0], logprob) for token, logprob in entry.top]
        return PromptToken(entry.token, *self._shown(entry.token), entry.logprob, top)

    def _glyphs_for(self, form: ReplyFormat | None) -> Glyphs:
        """Special tokens give no text, but for those by which an answer is taken apart."""
        if form is None:
            return self._glyphs
        markers = markers_of(form)
        if markers not in self._marked:
            self._marked[markers] = self._tokenizer.glyphs(shown=markers)
        return self._marked[markers]

    def _logprob(self, entry: TokenLogprob) -> TextLogprob:
        text, data = self._shown(entry.token)
        top = [(text, logprob, data) for token, logprob in entry.top for text, data in (self._shown(token),)]
        return TextLogprob(text, entry.logprob, data, top)

    def _shown(self, token: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace"), data
