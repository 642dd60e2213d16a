"""Tiers below the pool in a service with a small random model: disk and objects together, restores beside decoding."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from decode_loop import Service, prompt, save_random_llama

from flowinfer.cache.disk.io import Files
from flowinfer.cache.objects.client import Client
from flowinfer.message import Serving

VOCAB = 96


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, 1024)
    return folder


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


def disk(folder: Path) -> dict[str, Any]:
    return {"disk": {"path": str(folder / "kv"), "size": "64MiB", "segment": "1MiB", "spare": "0"}}


def objects(folder: Path) -> dict[str, Any]:
    return {"object": {"url": f"file://{folder}/objects", "refresh": "1h"}}


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for running in made:
        running.group.close()


def start(services: list[Service], llama: Path, tiers: dict[str, Any], num_blocks: int = 16) -> Service:
    running = Service(llama, num_blocks=num_blocks, lookup={"tiers": {"write": "all", **tiers}})
    running.group.emit(Serving())
    services.append(running)
    return running


def stop(services: list[Service], running: Service) -> None:
    services.remove(running)
    running.group.close()


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def answer(running: Service, id: str, seed: int, count: int = 300) -> tuple[list[int], int]:
    """(tokens of the answer, tokens of the prompt that were found)"""
    running.send(prompt(id, tokens(seed, count)))
    return running.finish([id])[id], int(running.client.ended[id].cached_tokens)


def counts(running: Service, tier: str) -> Any:
    (found,) = [one for one in running.decode.lower.tiers if one.name == tier]
    return found.store.counts


def test_objects_outlive_the_service(llama: Path, tmp_path: Path, services: list[Service]) -> None:
    first = start(services, llama, objects(tmp_path))
    text, _ = answer(first, "a", 1)
    stop(services, first)
    assert answer(start(services, llama, objects(tmp_path)), "b", 1) == (text, 256)


def test_what_the_disk_has_lost_comes_from_objects_and_goes_back_to_disk(
    llama: Path, tmp_path: Path, services: list[Service]
) -> None:
    both = disk(tmp_path) | objects(tmp_path)
    first = start(services, llama, both)
    text, _ = answer(first, "a", 1)
    stop(services, first)
    shutil.rmtree(tmp_path / "kv")
    second = start(services, llama, both)
    assert answer(second, "b", 1) == (text, 256) and counts(second, "object")["hits"] == 4
    stop(services, second)
    shutil.rmtree(tmp_path / "objects")
    assert answer(start(services, llama, both), "c", 1) == (text, 256)


def test_a_prefix_is_pieced_together_from_both(llama: Path, tmp_path: Path, services: list[Service]) -> None:
    first = start(services, llama, disk(tmp_path))
    answer(first, "head", 1, 130)
    stop(services, first)
    second = start(services, llama, objects(tmp_path))
    text, _ = answer(second, "a", 1, 300)
    stop(services, second)
    third = start(services, llama, disk(tmp_path) | objects(tmp_path))
    assert answer(third, "b", 1, 300) == (text, 256)
    assert (counts(third, "disk")["hits"], counts(third, "object")["hits"]) == (2, 2)


@pytest.mark.parametrize(
    ("how", "in_pool"),
    [({"cache_in_memory": True}, True), ({"cache_keep_s": 0.0}, False), ({"cache_class": "none"}, False)],
)
def test_what_must_not_leave_memory_is_in_no_tier_below_and_what_must_not_stay_in_none(
    llama: Path, tmp_path: Path, services: list[Service], how: dict[str, Any], in_pool: bool
) -> None:
    lookup = {"tiers": {"write": "all", **disk(tmp_path), **objects(tmp_path)}, "retention": {"none": "0"}}
    running = Service(llama, num_blocks=16, lookup=lookup)
    services.append(running)
    running.group.emit(Serving())
    one = prompt("a", tokens(1, 300))
    for field, value in how.items():
        setattr(one, field, value)
    running.send(one)
    text = running.finish(["a"])["a"]
    assert (running.pool.num_cached > 0) is in_pool
    stores = [tier.store for tier in running.decode.lower.tiers]
    stop(services, running)
    assert [store.counts["stored"] for store in stores] == [0, 0]
    again = start(services, llama, disk(tmp_path) | objects(tmp_path))
    assert answer(again, "b", 1) == (text, 0)
    kept = [tier.store for tier in again.decode.lower.tiers]
    stop(services, again)
    assert all(store.counts["stored"] > 0 for store in kept)


@pytest.mark.parametrize("fault", ["damaged", "gone", "error"])
def test_bad_objects_mean_computing_again_and_never_another_answer(
    llama: Path, tmp_path: Path, services: list[Service], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(services, llama, objects(tmp_path))
    text, _ = answer(first, "a", 1)
    stop(services, first)
    again = start(services, llama, objects(tmp_path))
    assert again.decode.lower.tiers[0].store.contains([], "") == 0  # the listing is there
    for path in (tmp_path / "objects" / "v1").rglob("*.chat.*"):
        if fault == "damaged":
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        elif fault == "gone":
            path.unlink()
    if fault == "error":

        def broken(*args: object) -> None:
            raise OSError("500 Internal Server Error")

        monkeypatch.setattr(Client, "get", broken)
    assert answer(again, "b", 1) == (text, 0)
    causes = {"damaged": "read_checksum", "gone": "read_gone", "error": "read_io"}
    assert counts(again, "object")[causes[fault]] > 0


class SlowStore:
    """Puts nothing until a tier that is being closed has asked for time so often; 0: ever, and there is no time."""

    def __init__(self, running: Service, num_asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.gate = threading.Event()
        (tier,) = running.decode.lower.tiers
        self.store, put = tier.store, tier.store.put

        def slow(*arguments: Any, **more: Any) -> Any:
            assert self.gate.wait(60)
            return put(*arguments, **more)

        def still_closing(doing: str, since: float) -> bool:
            self.asked.append(doing)
            if len(self.asked) == num_asked:
                self.gate.set()
            return num_asked > 0

        monkeypatch.setattr("flowinfer.engine.store_tier.TICK_S", 0.01)
        monkeypatch.setattr(tier.store, "put", slow)
        monkeypatch.setattr(tier.ctx, "still_closing", still_closing)


def test_a_slow_store_gets_the_time_that_it_needs_to_write_what_is_queued(
    llama: Path, tmp_path: Path, services: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(services, llama, disk(tmp_path), num_blocks=32)
    slow = SlowStore(running, 4, monkeypatch)
    texts = [answer(running, id, seed)[0] for seed, id in enumerate("ab")]
    assert slow.store.counts["stored"] == 0
    stop(services, running)
    assert slow.asked == ["writes cached blocks to the disk tier"] * len(slow.asked) and len(slow.asked) >= 4
    again = start(services, llama, disk(tmp_path), num_blocks=32)
    assert [answer(again, id, seed) for seed, id in enumerate("cd")] == [(text, 256) for text in texts]


def test_what_a_store_has_no_time_for_is_told_and_the_worker_ends(
    llama: Path,
    tmp_path: Path,
    services: list[Service],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = start(services, llama, disk(tmp_path), num_blocks=32)
    slow = SlowStore(running, 0, monkeypatch)
    monkeypatch.setattr(slow.store, "close", lambda: None)  # it would wait for its writers
    for seed, id in enumerate("ab"):
        answer(running, id, seed)
    stop(services, running)
    assert len(slow.asked) == 1 and "no time to write" in caplog.text
    slow.gate.set()


class Gated(Files):
    """Reads of blocks wait for the gate."""

    def __init__(self) -> None:
        self.gate, self.reading = threading.Event(), 0

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.reading += 1
        assert self.gate.wait(60)
        super().read(fd, buffers, offset)


def test_restores_run_side_by_side_and_hold_up_no_stream(llama: Path, tmp_path: Path, services: list[Service]) -> None:
    first = start(services, llama, disk(tmp_path), 40)
    expected = {id: answer(first, id, seed)[0] for id, seed in (("a", 1), ("b", 2), ("c", 3))}
    stop(services, first)
    running = start(services, llama, disk(tmp_path), 40)
    store, prefill = running.decode.lower.tiers[0].store, running.group.by_name["prefill"].stage
    files = store._reader._files = Gated()
    running.send(prompt("b", tokens(2, 300)), prompt("c", tokens(3, 300)))
    while len(prefill.restoring) < 2 or files.reading < 2:  # type: ignore[attr-defined]
        running.turn()
    running.send(prompt("d", tokens(4, 40), max_tokens=60))
    assert len(running.finish(["d"])["d"]) == 60, "a stream begins and ends while both wait for the disk"
    assert not {"b", "c"} & running.client.ended.keys()
    files.gate.set()
    got = running.finish(["b", "c"])
    assert got == {"b": expected["b"], "c": expected["c"]}
    assert [running.client.ended[id].cached_tokens for id in ("b", "c")] == [256, 256]


def test_a_session_of_growing_turns_is_answered_alike_from_every_tier(
    llama: Path, tmp_path: Path, services: list[Service]
) -> None:
    both = disk(tmp_path) | objects(tmp_path)
    first, turns, context = start(services, llama, both, 40), [], tokens(0, 40)
    for number in range(6):
        context = [*context, *tokens(100 + number, 60)]
        first.send(prompt(f"turn {number}", context))
        turns.append((list(context), first.finish([f"turn {number}"])[f"turn {number}"]))
        found = int(first.client.ended[f"turn {number}"].cached_tokens)
        assert found == (len(context) - 60 - 1) // 64 * 64 if number else not found, "decode's blocks are found too"
        context += turns[-1][1]

    def replay(running: Service, way: str) -> list[int]:
        found = []
        for number, (given, text) in reversed(list(enumerate(turns))):
            id = f"{way} {number}"
            running.send(prompt(id, given))
            assert running.finish([id])[id] == text, id
            found.append(int(running.client.ended[id].cached_tokens))
        return found

    expected = [(len(given) - 1) // 64 * 64 for given, _ in reversed(turns)]
    assert replay(first, "pool") == expected
    stop(services, first)
    restarted = start(services, llama, disk(tmp_path), 40)
    assert replay(restarted, "disk") == expected and counts(restarted, "disk")["hits"] > 0
    stop(services, restarted)
    shutil.rmtree(tmp_path / "kv")
    bare = start(services, llama, both, 40)
    assert replay(bare, "object") == expected and counts(bare, "object")["hits"] > 0
    cold = Service(llama, num_blocks=40, lookup={"share_inflight": False})
    for number, (given, text) in enumerate(turns):
        cold.pool.clear_cache()
        cold.send(prompt(f"cold {number}", given))
        assert cold.finish([f"cold {number}"])[f"cold {number}"] == text
    cold.group.close()


def test_a_default_folder_that_cannot_be_used_is_done_without(
    llama: Path,
    tmp_path: Path,
    services: list[Service],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLOWINFER_KV", str(tmp_path / "file" / "kv"))
    running = start(services, llama, {"disk": {"size": "64MiB"}})
    assert running.decode.lower is None and "no disk tier: " in caplog.text
    assert answer(running, "a", 1)[1] == 0 and answer(running, "b", 1)[1] == 256
    monkeypatch.setenv("FLOWINFER_KV", str(tmp_path / "kv"))
    assert (
        start(services, llama, {"disk": {"size": "64MiB"}}).decode.lower.tiers[0].store.settings.path == tmp_path / "kv"
    )
