"""Sequences that change their decoding worker while they run: no token lost, repeated or changed, nothing left over."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, prompt
from decode_loop import save_random_llama
from drafters import save_random_head

from flowinfer.message import Finish, HandOffRefused, KVData, Prompt
from flowinfer.transfer.tcp import TcpReceiver

VOCAB, CONTEXT = 96, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, CONTEXT)
    save_random_head(folder, folder / "draft.safetensors")
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Cluster] = []

    def begin(**options: Any) -> Cluster:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Cluster(model, folder, **options))
        return made[-1]

    yield begin
    for cluster in made:
        cluster.close()


def some(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def prompts(count: int = 6, max_tokens: int = 60) -> list[Prompt]:
    """Greedy, sampled and penalised ones, of all lengths."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        {"logprobs": 2},
        {"temperature": 0.8, "top_k": 12, "min_tokens": 5, "ignore_eos": False},
    ]
    return [
        prompt(f"r{n}", some(n, 1 + 37 * n % 150), max_tokens=max_tokens, **kinds[n % len(kinds)]) for n in range(count)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What the prompts give when nothing moves."""
    cluster = Cluster(model, tmp_path_factory.mktemp("still"))
    cluster.send(*prompts())
    answers = cluster.finish(p.id for p in prompts())
    cluster.close()
    return answers


def started(cluster: Cluster, tokens: int = 8, count: int = 6) -> None:
    """All prompts have given some tokens, and none all of them."""
    cluster.send(*prompts(count))
    wanted = [p.id for p in prompts(count)]
    cluster.until(lambda: all(len(cluster.door.tokens.get(id, ())) >= tokens for id in wanted))
    assert not cluster.door.ended


def check_clean(cluster: Cluster) -> None:
    """Every block is free, and no stage remembers a request."""
    engines = [
        w.by_name[s].stage.engine for w in cluster.workers.values() for s in ("prefill", "decode") if s in w.by_name
    ]  # type: ignore[attr-defined]
    cluster.until(lambda: all(not engine.held for engine in engines), 10)
    cluster.until(lambda: not any(worker.open_requests for worker in cluster.workers.values()), 10)
    assert all(engine.pool.num_free == engine.pool.num_blocks for engine in engines)


@pytest.mark.parametrize("mode", ["handoff", "replay"])
@pytest.mark.parametrize("shared", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("draft", ["none", "ngram", "head"])
def test_running_sequences_go_on_elsewhere_token_for_token(
    start: Any, expected: dict[str, list[int]], mode: str, shared: bool, draft: str
) -> None:
    cluster: Cluster = start(shared=shared, draft=draft)
    started(cluster)
    cluster.add("decode.1")
    cluster.leave("decode.0", mode)
    cluster.until(lambda: cluster.is_empty("decode.0"))
    assert not cluster.decode("decode.0").engine.held
    cluster.retire("decode.0")
    assert cluster.finish(expected) == expected
    assert cluster.decode("decode.1").num_steps
    assert cluster.door.num_repeated == 0
    assert all(isinstance(end, Finish) for end in cluster.door.ended.values())
    check_clean(cluster)


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "tcp"])
def test_a_prefill_worker_goes_while_what_it_computed_is_still_decoded(start: Any, shared: bool) -> None:
    wanted = prompts(max_tokens=220)
    expected = alone(start, wanted)
    cluster: Cluster = start(shared=shared)
    cluster.send(*wanted)
    cluster.until(lambda: all(len(cluster.door.tokens.get(id, ())) >= 4 for id in expected))
    cluster.add("prefill.1")
    cluster.leave("prefill.0", "handoff")
    cluster.until(lambda: cluster.is_empty("prefill.0"))
    engine: Any = cluster.workers["prefill.0"].by_name["prefill"].stage
    assert not engine.engine.held and len(cluster.door.ended) < len(expected)
    cluster.retire("prefill.0")
    assert cluster.finish(expected) == expected
    assert all(isinstance(end, Finish) for end in cluster.door.ended.values())
    check_clean(cluster)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_blocks_that_are_damaged_on_their_way_are_computed_here(
    start: Any, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    land, seen = TcpReceiver.land, [0]

    def damaged(self: TcpReceiver, data: KVData, targets: list[int]) -> Any:
        seen[0] += 1
        if seen[0] % every == 0:
            data.data = data.data.copy()
            data.data[seen[0] * 997 % len(data.data)] ^= 1 << seen[0] % 8
        return land(self, data, targets)

    monkeypatch.setattr(TcpReceiver, "land", damaged)
    cluster: Cluster = start(shared=False)
    cluster.send(*prompts())
    assert cluster.finish(expected) == expected and seen[0] >= every
    check_clean(cluster)


def test_prompts_that_wait_go_to_another_prefill_worker(start: Any, expected: dict[str, list[int]]) -> None:
    cluster: Cluster = start()
    cluster.send(*prompts())
    cluster.until(lambda: bool(cluster.workers["prefill.0"].open_requests))
    cluster.add("prefill.1")
    cluster.leave("prefill.0", "replay")
    cluster.until(lambda: cluster.is_empty("prefill.0"))
    cluster.retire("prefill.0")
    assert cluster.finish(expected) == expected
    check_clean(cluster)


def test_a_worker_without_room_is_asked_again_while_the_sequence_runs_on(
    start: Any, expected: dict[str, list[int]]
) -> None:
    cluster: Cluster = start()
    started(cluster)
    pool = cluster.add("decode.1").by_name["decode"].stage.engine.pool
    taken = pool.allocate(pool.num_free)
    cluster.leave("decode.0", "handoff")
    steps = cluster.decode("decode.0").num_steps
    cluster.until(lambda: cluster.decode("decode.0").num_steps > steps + 5)
    assert len(cluster.workers["decode.0"].open_requests) == len(expected)
    pool.release(taken)
    cluster.until(lambda: cluster.is_empty("decode.0"))
    assert cluster.finish(expected) == expected
    check_clean(cluster)


def test_what_is_cancelled_while_it_is_offered_is_free_when_the_other_refuses(start: Any) -> None:
    cluster, refused = start(), []
    started(cluster)
    taker, giver = cluster.add("decode.1").by_name["decode"].stage.engine, cluster.workers["decode.0"]
    taken, hear = taker.pool.allocate(taker.pool.num_free), giver.handle
    giver.handle = lambda event: refused.append(event) if isinstance(event, HandOffRefused) else hear(event)
    cluster.leave("decode.0", "handoff")
    cluster.until(lambda: len(refused) == 6)
    for request in list(cluster.door.tokens):
        cluster.cancel(request)
    cluster.turn(2)
    assert cluster.engine("decode.0").held, "lent, for all that this worker knows"
    for event in refused:
        hear(event)
    taker.pool.release(taken)
    check_clean(cluster)


@pytest.mark.parametrize("victim", ["decode.0", "decode.1"])
@pytest.mark.parametrize("shared", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6])
def test_a_death_in_the_middle_of_a_move_loses_nothing_that_the_other_worker_knows(
    start: Any, expected: dict[str, list[int]], victim: str, shared: bool, turns: int
) -> None:
    cluster: Cluster = start(shared=shared)
    started(cluster)
    cluster.add("decode.1")
    cluster.leave("decode.0", "handoff")
    cluster.turn(turns)
    known = cluster.kill(victim)
    cluster.add("decode.2")
    answers = cluster.finish(expected)
    failed = {id for id, end in cluster.door.ended.items() if not isinstance(end, Finish)}
    assert failed.isdisjoint(known)
    assert {id: answers[id] for id in expected.keys() - failed} == {id: expected[id] for id in expected.keys() - failed}
    check_clean(cluster)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_answer_is_right_and_every_block_is_free(
    model: Path, start: Any, tmp_path: Path, seed: int
) -> None:
    """Little memory, late messages, requests that come and are cancelled at any moment, decoders that follow."""
    rng = random.Random(seed)
    wanted = []
    for n in range(12):
        sampling = {"temperature": rng.choice([0.0, 0.8]), "seed": n}
        wanted.append(prompt(f"r{n}", some(n, rng.randrange(1, 160)), max_tokens=rng.randrange(1, 80), **sampling))
    cluster: Cluster = start(
        shared=rng.random() < 0.6,
        draft=rng.choice(["none", "ngram", "head"]),
        blocks=rng.choice([10, 20]),
        delays=random.Random(seed),
    )
    victims = rng.sample([p.id for p in wanted], 3)
    current, number = "decode.0", 0
    for one in wanted:
        cluster.send(one)
        cluster.turn(rng.randrange(0, 15))
        if victims and rng.random() < 0.3:
            cluster.cancel(victims.pop())
        if rng.random() < 0.3:
            number += 1
            cluster.add(f"decode.{number}")
            cluster.leave(current, rng.choice(["handoff", "handoff", "replay"]))
            old, current = current, f"decode.{number}"
            if rng.random() < 0.6:
                cluster.until(lambda old=old: cluster.is_empty(old))  # type: ignore[misc]
                cluster.retire(old)
    answers = cluster.finish(p.id for p in wanted)
    ended = cluster.door.ended
    assert all(isinstance(end, Finish) or end == "cancelled" for end in ended.values()), ended
    survivors = [p for p in wanted if ended[p.id] != "cancelled"]
    assert {p.id: answers[p.id] for p in survivors} == alone(start, survivors)
    check_clean(cluster)


def alone(start: Any, prompts: list[Prompt]) -> dict[str, list[int]]:
    """The answers when nothing moves and there is memory for all."""
    cluster: Cluster = start()
    cluster.send(*prompts)
    return cluster.finish(p.id for p in prompts)
