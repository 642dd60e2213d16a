"""The waterfall of `flowinfer trace`, from steps as the service tells them."""

from __future__ import annotations

from typing import Any

import pytest

from flowinfer.cli.trace import waterfall


def step(stage: str, started: float, ended: float, shared: bool = False) -> dict[str, Any]:
    return {"stage": stage, "started": started, "ended": ended, "batch": 1, "shared": shared}


ANSWER = {
    "id": "a",
    "workers": [
        {"worker": "front.0", "since": 0.0, "steps": [step("route", 10.0, 10.1), step("detokenize", 13.2, 13.3)]},
        {
            "worker": "decode.0",
            "since": 0.0,
            "steps": [step("decode", 10.6, 11.6), step("decode", 12.0, 13.0, True), step("decode", 20.0, 21.0, True)],
        },
    ],
}


def test_each_stage_has_a_bar_with_waiting_and_working_time() -> None:
    route, decode, detokenize = waterfall(ANSWER)
    assert (route.stage, route.start, route.queue) == ("route", 0.0, 0.0)
    assert (decode.worker, decode.steps) == ("decode.0", 2)  # the third belongs to whoever came later
    assert (decode.queue, decode.work) == (pytest.approx(0.5), pytest.approx(2.0))
    assert (detokenize.start, detokenize.end) == (pytest.approx(3.2), pytest.approx(3.3))


def test_of_a_request_that_nobody_knows_there_is_nothing() -> None:
    assert waterfall({"id": "a", "workers": [{"worker": "front.0", "since": 0.0, "steps": []}]}) == []
