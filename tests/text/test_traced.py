"""Traced strings: equal to what str gives, and never a character marked as the author's that isn't."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.text.traced import Segment, Traced, join_traced, segments_of

# The author writes capitals, users write small letters; punctuation belongs to both.
author_parts = st.text("AB-% ", max_size=4).map(Traced.author)
user_parts = st.text("ab-% ", max_size=4)
strings = st.lists(author_parts | user_parts, max_size=4).map(join_traced)
separators = st.sampled_from(["-", "A", "a", " ", "B-", "%%"])
numbers = st.integers(-6, 6)
Operation = Callable[[str], object]


def operations() -> st.SearchStrategy[Operation]:
    return st.one_of(
        strings.map(lambda other: lambda text: text + other),
        strings.map(lambda other: lambda text: other + text),
        strings.map(lambda other: lambda text: text.join([other, "b", other])),
        strings.map(lambda other: lambda text: other.join([text, "b", text])),
        st.tuples(separators, strings, numbers).map(lambda a: lambda text: text.replace(*a)),
        st.tuples(numbers, numbers).map(lambda a: lambda text: text[a[0] : a[1]]),
        st.just(lambda text: text[::-1]),
        st.just(lambda text: text * 2),
        st.sampled_from([None, "-", "A", "a "]).map(lambda chars: lambda text: text.strip(chars)),
        st.sampled_from([None, "-", "A", "a "]).map(lambda chars: lambda text: text.lstrip(chars).rstrip(chars)),
        separators.map(lambda text: lambda other: other.removeprefix(text).removesuffix(text)),
        st.tuples(separators, numbers).map(lambda a: lambda text: text.split(*a)[0]),
        st.tuples(separators, numbers).map(lambda a: lambda text: text.rsplit(*a)[-1]),
        st.just(lambda text: text.split()[-1] if text.split() else text),
        separators.map(lambda by: lambda text: text.partition(by)[2]),
        separators.map(lambda by: lambda text: text.rpartition(by)[0]),
        st.just(lambda text: text.title()),
        st.just(lambda text: str(text).zfill(9)),
        st.just(lambda text: text.format() if not set("{}") & set(text) else text),
    )


@settings(max_examples=500, deadline=None)
@given(start=strings, steps=st.lists(operations(), max_size=5))
def test_operations_agree_with_str_and_mark_nothing_that_users_wrote(start: str, steps: list[Operation]) -> None:
    traced, plain = start, str.__str__(start)
    for step in steps:
        traced, plain = step(traced), step(plain)  # type: ignore[assignment]
        assert traced == plain
        plain = str.__str__(traced)
    for segment in segments_of(traced):
        assert type(segment.text) is str
        assert not (segment.control and set("ab") & set(segment.text))
    assert "".join(segment.text for segment in segments_of(traced)) == plain


def test_percent_fills_keep_who_wrote_what() -> None:
    text = Traced.author("<%s|%s>%%") % ("u", Traced.author("V"))
    assert segments_of(text) == [
        Segment(True, "<"),
        Segment(False, "u"),
        Segment(True, "|V>"),
        Segment(False, "%"),
    ]
    assert segments_of(Traced.author("%5s") % "u") == [Segment(False, "    u")]


def test_what_replaces_user_text_is_user_text() -> None:
    text = join_traced(["x", Traced.author("x")]).replace("x", Traced.author("<m>"))
    assert segments_of(text) == [Segment(False, "<m>"), Segment(True, "<m>")]


def test_making_a_string_anew_forgets_its_author() -> None:
    text = Traced.author("<m>")
    assert segments_of(Traced(text)) == [Segment(False, "<m>")]
    assert type(pickle.loads(pickle.dumps(text))) is str
    assert type(copy.deepcopy(text)) is str


def test_a_growing_letter_forgets_where_spans_were() -> None:
    assert segments_of(join_traced(["ß", Traced.author("<m>")]).upper()) == [Segment(False, "SS<M>")]
