"""A mailbox keeps all text, in order, in few objects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.errors import RequestError
from flowinfer.message import Finish, Piece, TextLogprob
from flowinfer.serve import mailbox as module
from flowinfer.serve.asgi import Disconnected
from flowinfer.serve.mailbox import PIECE_BYTES, Mailbox

LIMIT = 4096


def piece(id: str, text: str, *, end: bool = False) -> Piece:
    logprob = TextLogprob(text, -1.0, text.encode())
    return Piece(
        id=id, text=text, tokens=[len(text)], logprobs=[logprob], finish=Finish(reason="stop") if end else None
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=300), st.booleans()), max_size=60))
def test_nothing_is_lost_or_reordered_however_it_is_read(events: list[tuple[str, str, bool]]) -> None:
    box = Mailbox(2, LIMIT)
    sent: dict[str, list[str]] = {"a": [], "b": []}
    got: list[Piece] = []
    for id, text, read in events:
        box.put(piece(id, text))
        sent[id].append(text)
        got += (box.take() or []) if read else []
    got += box.take() or []
    for id, texts in sent.items():
        mine = [p for p in got if p.id == id]
        assert "".join(p.text for p in mine) == "".join(texts)
        assert [token for p in mine for token in p.tokens] == [len(text) for text in texts]
        assert [entry.text for p in mine for entry in p.logprobs] == texts


def test_an_unread_box_holds_few_objects_and_copies_little(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    join = module.joined

    def counting(pieces: list[Piece]) -> Piece:
        nonlocal copied
        copied += sum(len(p.text) for p in pieces)
        return join(pieces)

    monkeypatch.setattr(module, "joined", counting)
    box = Mailbox(1, LIMIT)
    for _ in range(20_000):
        box.put(Piece(id="a", text="x" * 100))
    total = 20_000 * 100
    assert copied < 10 * total  # joining at every overflow would copy it 1,600 times
    pieces = box.take() or []
    assert sum(len(p.text) for p in pieces) == total
    assert len(pieces) * PIECE_BYTES < 2 * total


def test_an_error_comes_behind_the_text() -> None:
    box = Mailbox(1, LIMIT)
    box.put(piece("a", "kept"))
    box.put(RequestError(500, "broke"))
    assert [p.text for p in box.take() or []] == ["kept"]
    with pytest.raises(RequestError, match="broke"):
        box.take()


def test_a_client_that_left_hears_nothing_more() -> None:
    box = Mailbox(1, LIMIT)
    box.put(piece("a", "text"))
    box.leave()
    with pytest.raises(Disconnected):
        box.take()


def test_a_whole_answer_wakes_its_reader_once() -> None:
    async def read() -> tuple[bool, list[Any]]:
        box = Mailbox(1, LIMIT, whole=True)
        news = box.news()
        box.put(piece("a", "half"))
        early = news.done() or box.take() is not None
        box.put(piece("a", "", end=True))
        await news
        return early, box.take() or []

    early, pieces = asyncio.run(read())
    assert not early
    assert [p.text for p in pieces] == ["half", ""]
