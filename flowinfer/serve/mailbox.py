"""What has come for one HTTP request and isn't sent yet. A slow reader fills its own mailbox, and stops only itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import groupby

from flowinfer.errors import RequestError
from flowinfer.message import CallPart, Piece
from flowinfer.serve.asgi import Disconnected

PIECE_BYTES = 512  # of a Piece object beside its text: structs, ids, list slots


class Mailbox:
    """Pieces of the choices of one request, in order. Lives in the HTTP loop; `put` is called there.

    Beyond `limit` bytes, pieces of a choice are joined into one: text is kept
    whole, what grows is only the text itself. With whole=True, a reader is woken only by the end.
    """

    def __init__(self, num_choices: int, limit: int, *, whole: bool = False) -> None:
        self.num_unfinished = num_choices
        self._limit = self._join_at = limit
        self._whole = whole
        self._pieces: list[Piece] = []
        self._size = 0
        self._error: RequestError | None = None
        self._gone = False
        self._ticked = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Nothing more will come: every choice ended, or the request failed."""
        return self._error is not None or not self.num_unfinished

    def put(self, item: Piece | RequestError) -> None:
        """Takes what the gateway says of this request. Never waits."""
        if isinstance(item, RequestError):
            self._error = item
        else:
            self._pieces.append(item)
            self._size += _size_of(item)
            self.num_unfinished -= item.finish is not None
            if self._size > self._join_at:
                self._join()
        if not self._whole or self.closed:
            self._wake()

    def leave(self) -> None:
        """The client went away: whoever waits is told by Disconnected."""
        self._gone = True
        self._wake()

    def tick(self) -> None:
        """Lets a waiting reader go on with nothing, so that it can send a sign of life."""
        self._ticked = True
        self._wake()

    def take(self) -> list[Piece] | None:
        """All that has come, [] after a tick, None if `news` is to be awaited. Raises Disconnected or the error."""
        if self._gone:
            raise Disconnected
        if self._pieces and (self.closed or not self._whole):
            return self._empty()
        if self._error is not None:
            raise self._error
        return self._empty() if self._ticked else None

    def news(self) -> asyncio.Future[None]:
        """Done when `take` has something to say; await it at once. A future and not a coroutine: 1 µs less a token."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _empty(self) -> list[Piece]:
        pieces, self._pieces, self._size, self._ticked = self._pieces, [], 0, False
        self._join_at = self._limit
        return pieces

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _join(self) -> None:
        by_id: dict[str, list[Piece]] = {}
        for piece in self._pieces:
            by_id.setdefault(piece.id, []).append(piece)
        self._pieces = [joined(pieces) for pieces in by_id.values()]
        self._size = sum(map(_size_of, self._pieces))
        # What is left is the answer itself, which max_tokens bounds. Joined again once it has doubled: each
        # character is then copied some six times at most, however long the reader sleeps.
        self._join_at = max(self._limit, 2 * self._size)


def _size_of(piece: Piece) -> int:
    size = PIECE_BYTES + len(piece.text) + len(piece.reasoning)
    return size + sum(PIECE_BYTES + len(part.arguments) for part in piece.calls) if piece.calls else size


def joined(pieces: list[Piece]) -> Piece:
    """One piece that says the same as these pieces of one choice."""
    return Piece(
        id=pieces[-1].id,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        finish=pieces[-1].finish,
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=_joined_calls(part for piece in pieces for part in piece.calls),
        opened=next((piece.opened for piece in pieces if piece.opened), None),
    )


def _joined_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    whole: list[CallPart] = []
    for index, group in groupby(parts, key=lambda part: part.index):
        first, *rest = group
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        whole.append(CallPart(index=index, id=first.id, name=first.name, arguments=arguments))
    return whole
