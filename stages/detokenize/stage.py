"""Turns tokens into text, a step of all sequences at a time. What text may go out is decided in policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from flowinfer.errors import RequestError
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
    WorkerDown,
)
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.detokenize.policy import Step, Stream
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
    listens = (Ended, WorkerDown)

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
        self._awaited: dict[str, str] = {}  # sequences that go on elsewhere, and the worker that owes their last tokens

    def step(self, tokens: list[Tokens]) -> Iterable[Text]:
        return [text for batch in tokens if (text := self._text(batch)).pieces]

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            self._streams.pop(request, None)
            self._awaited.pop(request, None)

    def observe(self, event: Event) -> Iterable[Message] | None:
        if isinstance(event, Ended):
            self.cancel(event.ids)
        elif isinstance(event, WorkerDown):
            for request in [id for id, giver in self._awaited.items() if giver == event.worker]:
                self._give_up(request, event.worker)
        return None

    @property
    def num_open(self) -> int:
        """Sequences whose text isn't at its end."""
        return len(self._streams)

    def _text(self, batch: Tokens) -> Text:
        streams = self._streams
        places = [-1] * len(batch.ids) if batch.positions is None else batch.positions.tolist()
        pieces = [piece for opening in batch.opened for piece in self._open_stream(opening)]
        flat, at = batch.tokens.tolist(), 0
        for row, (request, count) in enumerate(zip(batch.ids, batch.counts.tolist(), strict=True)):
            start, at = at, at + count
            stream = streams.get(request)
            if stream is None:
                continue  # it was cut or cancelled, and the model had a step in flight
            logprobs = [self._logprob(entry) for entry in batch.logprobs[row]] if row in batch.logprobs else ()
            finish = batch.finished.get(row)
            if stream.waits or 0 <= places[row] != stream.num_tokens:
                pieces += self._place(request, places[row], (flat[start:at], logprobs, finish))
                continue
            piece = stream.advance(flat[start:at], logprobs, finish)
            if piece is not None:
                pieces.append(piece)
                if piece.finish is not None:
                    self.cancel((request,))
        return Text(step=batch.step, pieces=pieces)

    def _open_stream(self, opening: Opening) -> list[Piece]:
        """A sequence begins, or goes on in another worker, whose tokens may overtake the last ones of the one before.

        What that one gave came along, so nobody has to wait for it, but where each token has its log-probability.
        """
        if opening.id not in self._streams:
            if self.ctx.is_over(opening.id):
                return []
            self._streams[opening.id] = Stream(opening, self._glyphs_for(opening.sampling.reply), self._opened(opening))
        if opening.before is None:
            return []
        if opening.sampling.logprobs is not None:
            self._awaited[opening.id] = opening.giver
            return []
        return self._place(opening.id, 0, (opening.before.tolist(), (), None))

    def _place(self, request: str, position: int, step: Step) -> list[Piece]:
        """Text of tokens that don't just follow the last ones: they are early, or were given twice."""
        pieces = self._streams[request].place(position, step)
        if pieces and pieces[-1].finish is not None:
            self.cancel((request,))
        return pieces

    def _give_up(self, request: str, giver: str) -> None:
        """A worker died whose last tokens a sequence still waits for."""
        stream = self._streams.get(request)
        if stream is not None and stream.waits:
            text = f"Worker {giver} died with log-probabilities of this request. Send it again."
            self.ctx.fail(request, RequestError(503, text, code="worker_died", retry_after_s=1.0))

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
