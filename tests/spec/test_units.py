"""Quantities: what is written for a value reads back as the value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.units import format_bytes, format_duration, format_tokens, parse_bytes, parse_duration, parse_tokens


@given(st.integers(0, 2**50))
def test_sizes_round_trip(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(0, 2**40))
def test_token_counts_round_trip(tokens: int) -> None:
    assert parse_tokens(format_tokens(tokens)) == tokens


@given(st.integers(0, 10**12))
def test_durations_of_whole_microseconds_round_trip(microseconds: int) -> None:
    seconds = microseconds / 1e6
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_duration, "50ms", 0.05),
        (parse_duration, "3d", 259200.0),
        (parse_duration, "0", 0.0),
        (parse_bytes, "1GiB", 2**30),
        (parse_bytes, "20GB", 20 * 10**9),
        (parse_tokens, "2k", 2048),
    ],
)
def test_quantities(parse: object, text: str, value: float) -> None:
    assert callable(parse) and parse(text) == value


@pytest.mark.parametrize("text", ["50", "50 parsecs", "-1s", "", "ms"])
def test_durations_without_a_known_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)
