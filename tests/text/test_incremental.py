"""Streams: pieces join to the full decode, characters are whole, stops cut at the same place however text is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.text.incremental import ByteStream, Glyphs, Match, StopScanner
from flowinfer.text.tokenizer import TextTokenizer

MakeTokenizer = Callable[..., TextTokenizer]
relaxed = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    characters = ByteStream(tokenizer.glyphs())
    return [*(characters.push(index) for index in ids), characters.flush()]


@relaxed
@given(data=st.data())
def test_byte_level_streams_join_to_the_reference_decode(tiny: TextTokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1), max_size=30))
    wanted = tiny.vocabulary.full.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tiny, ids)) == wanted
    assert tiny.decode(ids) == wanted


@pytest.mark.parametrize("kind", ["spm", "unigram"])
@relaxed
@given(
    words=st.lists(
        st.sampled_from(["▁What", "▁is", "▁capital", "a", "▁", "</s>", "<think>", "ü", "你", "🙂"]), max_size=12
    )
)
def test_sentencepiece_streams_join_to_the_reference_decode(
    make_tokenizer: MakeTokenizer, kind: str, words: list[str]
) -> None:
    tokenizer = make_tokenizer(kind)
    full = tokenizer.vocabulary.full
    ids: list[int] = []
    for word in words:
        index = full.token_to_id(word)
        fallback = [full.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
        ids += [index] if index is not None else [byte for byte in fallback if byte is not None]
    wanted = full.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, ids)) == wanted
    assert tokenizer.decode(ids) == wanted


@pytest.mark.parametrize("kind", ["byte", "spm", "unigram"])
@relaxed
@given(data=st.data())
def test_any_ids_stream_as_they_decode(make_tokenizer: MakeTokenizer, kind: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@relaxed
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_no_piece_holds_half_a_character(make_tokenizer: MakeTokenizer, text: str) -> None:
    tokenizer = make_tokenizer("byte")
    pieces = stream(tokenizer, tokenizer.encode_plain(text).tolist())
    assert "\ufffd" not in "".join(pieces)


def test_an_invalid_byte_shows_once_it_is_certain() -> None:
    characters = ByteStream(Glyphs([b"\xe4", b"\xbd", b"\xa0", b"a"]))
    assert [characters.push(token) for token in (0, 1, 2)] == ["", "", "你"]
    assert [characters.push(token) for token in (0, 3)] == ["", "\ufffda"]
    assert (characters.push(0), characters.flush(), characters.flush()) == ("", "\ufffd", "")


# ------------------------------------------------------------------------------------------------------ stop strings


def scan(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    scanner, out = StopScanner(stops), ""
    for piece in pieces:
        found = scanner.push(piece)
        if isinstance(found, Match):
            return out + found.text, found.stop
        out += found
    return out + scanner.flush(), None


def by_character(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The definition: read on until the text ends in a stop; the longest such stop is cut off."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


words = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(stops=stop_lists, pieces=st.lists(words, max_size=6))
def test_a_stop_cuts_at_the_same_place_however_text_is_split(stops: list[str], pieces: list[str]) -> None:
    assert scan(stops, pieces) == by_character(stops, "".join(pieces))


@settings(max_examples=300, deadline=None)
@given(stops=stop_lists, pieces=st.lists(words, max_size=6))
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], pieces: list[str]) -> None:
    scanner, seen, out = StopScanner(stops), "", ""
    for piece in pieces:
        found = scanner.push(piece)
        if isinstance(found, Match):
            return
        seen, out = seen + piece, out + found
        ends = [
            n for n in range(len(seen) + 1) if any(len(s) > n and s.startswith(seen[len(seen) - n :]) for s in stops)
        ]
        assert out == seen[: len(seen) - max(ends)]


def test_a_stop_completed_before_it_counts_is_let_through_for_good() -> None:
    scanner = StopScanner(["ab", "xabyz"])
    assert scanner.push("xab", armed=False) == ""  # may still become xabyz
    assert scanner.push("c") == "xabc"
    assert scanner.push("ab") == Match("", "ab")
