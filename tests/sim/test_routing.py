"""Ways of sharing prompts out over workers, in virtual time."""

from __future__ import annotations

import random

import pytest

from flowinfer.sim.routing import WAYS, Routed, route
from flowinfer.sim.trace import Trace, TraceRequest


def chats(num_turns: int = 12, num_chats: int = 24) -> Trace:
    """Chats that grow by two blocks of 64 tokens a turn, in random order; one request a second."""
    rng, turns, requests = random.Random(0), [0] * num_chats, []
    for at in range(num_turns * num_chats):
        chat = rng.choice([c for c in range(num_chats) if turns[c] < num_turns])
        turns[chat] += 1
        blocks = tuple(f"{chat}/{depth}".encode() for depth in range(2 * turns[chat]))
        requests.append(TraceRequest(float(at), 64 * len(blocks), 0, blocks, str(chat)))
    return Trace("chats", 64, requests)


@pytest.fixture(scope="module")
def routed() -> dict[str, Routed]:
    trace = chats()
    return {way: route(trace, way, 4, trace.working_set // 4, load=4.0) for way in WAYS}


def test_prefix_finds_far_more_than_pull(routed: dict[str, Routed]) -> None:
    assert routed["prefix"].hit_rate > 1.5 * routed["pull"].hit_rate


def test_prefix_is_better_balanced_and_waits_less_than_hash(routed: dict[str, Routed]) -> None:
    assert routed["prefix"].balance < routed["hash"].balance
    assert routed["prefix"].wait_mean_s < routed["hash"].wait_mean_s


def test_one_worker_gets_everything_whatever_the_way() -> None:
    trace = chats(num_turns=4, num_chats=4)
    first, *others = [route(trace, way, 1, trace.working_set) for way in WAYS]
    assert all((r.hit_rate, r.balance, r.wait_mean_s) == (first.hit_rate, 1.0, first.wait_mean_s) for r in others)
