"""A short run of the fuzzer of answers, and proof that it finds what is broken."""

from __future__ import annotations

import pytest
from fuzz_replies import fuzz

from flowinfer.text.reply import cursor


def test_no_way_of_cutting_an_answer_changes_it() -> None:
    assert fuzz(2026, cases=400)[1] is None


def test_a_parser_that_lets_half_a_marker_go_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(buffer: str, markers: object) -> int:
        return 0

    monkeypatch.setattr(cursor, "open_end", hasty)
    _, found = fuzz(2026, cases=300)
    assert found is not None and "for tokens of" in found


@pytest.mark.slow
def test_ten_minutes_of_it() -> None:
    assert fuzz(2027, seconds=600)[1] is None
