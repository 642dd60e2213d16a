"""What a worker remembers of its last steps."""

from __future__ import annotations

import time

import numpy as np

from flowinfer.message import Logits, Piece, Prompt, Sampling, Text, Tokens
from flowinfer.runtime.trace import Trace


def tokens(*ids: str) -> Tokens:
    return Tokens(step=1, ids=list(ids), counts=np.ones(len(ids), np.int32), tokens=np.ones(len(ids), np.int32))


def prompt(id: str) -> Prompt:
    return Prompt(id=id, tokens=np.zeros(1, np.int32), sampling=Sampling())


def logits() -> Logits:
    return Logits(step=1, slots=np.zeros(1, np.int32), starts=np.zeros(2, np.int32), logits=None)


def test_steps_that_had_a_request_are_found_however_it_is_named() -> None:
    trace = Trace(0.0)
    trace.add("route", [[prompt("a"), prompt("b")]], 1.0, 2.0)
    trace.add("detokenize", [[tokens("b", "c")]], 3.0, 4.0)
    trace.add("api", [[Text(step=1, pieces=[Piece(id="c")])]], 5.0, 6.0)
    assert [(s.stage, s.started, s.batch) for s in trace.of("b")] == [("route", 1.0, 2), ("detokenize", 3.0, 1)]
    assert [s.stage for s in trace.of("c")] == ["detokenize", "api"]
    assert trace.of("d") == []


def test_steps_of_a_batch_count_once_the_request_has_come() -> None:
    trace = Trace(0.0)
    trace.add("verify", [[logits()]], 0.0, 0.5)
    trace.add("decode", [[prompt("a")]], 1.0, 2.0)
    trace.add("verify", [[logits()]], 2.0, 2.5)
    assert [(s.stage, s.shared) for s in trace.of("a")] == [("decode", False), ("verify", True)]


def test_only_the_last_steps_are_kept() -> None:
    trace = Trace(0.0, num_steps=3)
    for number in range(10):
        trace.add("route", [[prompt(str(number))]], number, number + 1)
    assert [bool(trace.of(str(number))) for number in range(10)] == [False] * 7 + [True] * 3


def test_a_message_costs_little() -> None:
    """0.1 µs each on an idle core; the bound leaves room for a busy machine."""
    trace, inputs = Trace(0.0), [[prompt("a")] * 100]
    best = min(_seconds(trace, inputs) for _ in range(50))
    assert best / 100 < 1e-6


def _seconds(trace: Trace, inputs: list[list[Prompt]]) -> float:
    started = time.perf_counter()
    trace.add("route", inputs, 0.0, 1.0)
    return time.perf_counter() - started
