"""An agent's session over true processes: the same answers from every tier, and restoring beats computing by far."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_session import measure


@pytest.mark.slow
def test_a_session_is_answered_alike_from_every_tier_and_restoring_is_five_times_faster(
    smollm2: Path, tmp_path: Path
) -> None:
    """30 turns to more than 4,000 tokens; `measure` raises where a text differs. Ten minutes on two loaded cores."""
    _, marks = measure(30, 130, tmp_path / "kv", tmp_path / "objects")
    last = marks[-1]
    assert last.num_tokens > 4000
    assert all(last.found[way] > last.num_tokens - 130 for way in ("pool", "memory", "disk", "object")), last.found
    assert last.found["cold"] == 0
    for way in ("pool", "disk", "object"):
        assert last.seconds[way] < last.seconds["cold"] / 5, last.seconds
