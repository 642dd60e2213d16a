"""The expressions of `flowinfer tap --where`: what they find, and that they can't do anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.errors import FlowInferError
from flowinfer.message import Piece, Prompt, Sampling, Text, Tokens
from flowinfer.observe.where import compile_where

PROMPT = Prompt(id="x", tokens=np.arange(120, dtype=np.int32), sampling=Sampling(temperature=0.5), bucket="short")
BATCH = Tokens(step=3, ids=["a", "b"], counts=np.array([1, 2], np.int32), tokens=np.array([7, 8, 9], np.int32))
TEXT = Text(step=1, pieces=[Piece(id="a", text="hi"), Piece(id="c", tokens=[1, 2])])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "request == 'x' and num_tokens > 100",
        "sampling.temperature < 1 and not sampling.top_k",
        "bucket in ['short', 'medium']",
        "100 < num_tokens <= 120",
        "len(tokens) % 7 == 1",
        "prefix is None or prefix.hashes",
        "type == 'Prompt' and deadline is None",
        "request in ('x', 'y')",
        "-num_tokens < 0",
    ],
)
def test_what_holds_of_a_prompt(text: str) -> None:
    assert compile_where(text, Prompt)(PROMPT)


@pytest.mark.parametrize(
    "text",
    [
        "request == 'y'",
        "num_tokens > 120",
        "deadline > 5",
        "bucket > 3",
        "num_tokens / 0 == 1",
        "id == 'x' and bucket == 1",
    ],
)
def test_what_doesnt_hold_or_cant_be_compared_is_no_match(text: str) -> None:
    assert not compile_where(text, Prompt)(PROMPT)


def test_a_batch_is_of_each_of_its_requests() -> None:
    assert compile_where("request == 'b' and num_tokens == 3", Tokens)(BATCH)
    assert not compile_where("request == 'c'", Tokens)(BATCH)
    assert compile_where("request == 'c' and num_tokens == 2", Text)(TEXT)
    assert compile_where("request != 'z'", Text)(TEXT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_token > 1", "character 1: 'num_token' is no field of Prompt"),
        ("id == 'a' and", "can't be read at character"),
        ("exec('x')", "isn't something"),
        ("id.__class__.__mro__ == ()", None),
        ("[x for x in tokens]", "isn't something"),
        ("(lambda: 1)()", "isn't something"),
        ("tokens[0] == 1", "isn't something"),
        ("2 ** 9999999 > 1", "isn't something"),
        ("f'{id}' == 'x'", "isn't something"),
        ("(" * 60 + "1" + ")" * 60 + " == " + "not " * 40 + "1", "."),
        ("1 + " * 300 + "1", "longer than|deeper than"),
    ],
)
def test_what_isnt_known_is_refused_with_its_place(text: str, message: str | None) -> None:
    if message is None:  # readable, but a text has no fields
        assert not compile_where(text, Prompt)(PROMPT)
        return
    with pytest.raises(FlowInferError, match=message):
        compile_where(text, Prompt)


def test_a_short_expression_cannot_make_a_long_value() -> None:
    assert not compile_where("'a' * 1000000000 == 'b'", Prompt)(PROMPT)
    assert not compile_where("[1, 2] * 1000000000 == 'b'", Prompt)(PROMPT)


numbers = st.sampled_from(["num_tokens", "3", "120", "7"])
terms = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=5,
)
comparisons = st.tuples(terms, st.sampled_from(["<", "<=", "==", "!=", ">"]), terms).map(" ".join)
conditions = st.recursive(
    comparisons,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})")
        | inner.map("not ({})".format)
    ),
    max_leaves=6,
)


@given(conditions)
def test_it_says_what_python_would(text: str) -> None:
    try:
        wanted: Any = bool(eval(text, {"__builtins__": {}}, {"num_tokens": 120}))
    except ZeroDivisionError:
        return
    assert compile_where(text, Prompt)(PROMPT) is wanted


@given(st.text(max_size=60))
def test_any_text_is_a_test_or_an_error_of_ours(text: str) -> None:
    try:
        holds = compile_where(text, Prompt)
    except FlowInferError:
        return
    assert holds(PROMPT) in (True, False)
