"""The disk tier in a service: answers are the same cold, from memory and from disk after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_loop import Service, prompt, save_random_llama

from flowinfer.cache.disk.io import Files
from flowinfer.cache.disk.offline import entries
from flowinfer.cache.disk.store import DiskStore
from flowinfer.cache.tiers import ReadSpeed, worth_restoring
from flowinfer.engine import hub
from flowinfer.errors import ModelError, RequestError, StageError
from flowinfer.graph.planner import load_plan
from flowinfer.message import Call, Finish, Prompt, Sampling, Serving
from flowinfer.runtime.local import LocalService

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"


@pytest.fixture(scope="module")
def model() -> Iterator[None]:
    try:
        hub.resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    yield None


def service(folder: Path, **more: str) -> LocalService:
    sets = {
        "stages.prefill.with.dtype": "float32",
        "stages.lookup.with.tiers.memory": "256MiB",
        "stages.lookup.with.tiers.disk.path": str(folder),
        "stages.lookup.with.tiers.disk.size": "1GiB",
        **more,
    }
    return LocalService(load_plan(QUICKSTART, sets=[f"{key}={value}" for key, value in sets.items()]))


def ask(running: LocalService, tokens: list[int], max_tokens: int = 8, **fields: str) -> tuple[list[int], Finish]:
    call = Call(
        id=f"r{random.random()}",
        prompt=np.array(tokens, np.int32),
        sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
    pieces = running.generate([call])[call.id]
    assert not isinstance(pieces, RequestError), pieces
    finish = pieces[-1].finish
    assert finish is not None
    return [token for piece in pieces for token in piece.tokens], finish


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=count)


def test_cold_memory_and_disk_after_a_restart_answer_alike(model: None, tmp_path: Path) -> None:
    prompt = some_tokens(0, 400)
    with service(tmp_path) as running:
        cold, cold_finish = ask(running, prompt, 70)
        warm, warm_finish = ask(running, prompt, 70)
    with service(tmp_path) as running:
        restored, restored_finish = ask(running, prompt, 70)
        follow_up, follow_finish = ask(running, [*prompt, *restored, 5, 6, 7])
    with service(tmp_path) as running:
        again, again_finish = ask(running, [*prompt, *restored, 5, 6, 7])
    assert cold == warm == restored and follow_up == again
    assert (cold_finish.cached_tokens, warm_finish.cached_tokens) == (0, 384)
    assert restored_finish.cached_tokens == 384, "nothing was found on disk after the restart"
    assert follow_finish.cached_tokens == again_finish.cached_tokens == 448, "what decode wrote wasn't kept"


# ------------------------------------------------------------------- a small random model: faults, cancels, tiny pools

VOCAB = 96


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_llama(folder, VOCAB, 1024)
    return folder


@pytest.fixture
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


def small(llama: Path, folder: Path | None, num_blocks: int = 16, **disk: str) -> Service:
    tiers = {"disk": {"path": str(folder), "size": "64MiB", "segment": "1MiB", **disk}} if folder else {}
    made = Service(llama, num_blocks=num_blocks, lookup={"tiers": tiers})
    made.group.emit(Serving())
    return made


def disk_of(running: Service) -> DiskStore:
    (tier,) = running.decode.lower.tiers
    assert isinstance(tier.store, DiskStore)
    return tier.store


def small_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def answer(running: Service, *prompts: Prompt) -> dict[str, list[int]]:
    running.send(*prompts)
    return running.finish(one.id for one in prompts)


def cached(running: Service, id: str) -> int:
    return int(running.client.ended[id].cached_tokens)


def damage(folder: Path) -> None:
    """Turns bits of every page behind the first header."""
    for path in folder.glob("*.seg"):
        data = bytearray(path.read_bytes())
        data[9000::4096] = bytes(byte ^ 1 for byte in data[9000::4096])
        path.write_bytes(data)


def test_what_memory_has_lost_comes_back_from_disk(llama: Path, tmp_path: Path, restoring: None) -> None:
    running = small(llama, tmp_path)
    first = answer(running, prompt("a", small_tokens(1, 300)))
    while running.pool.num_free < 16 or disk_of(running).counts["stored"] < 4:
        running.turn()
    answer(running, *[prompt(f"x{n}", small_tokens(10 + n, 400)) for n in range(4)])
    again = answer(running, prompt("b", small_tokens(1, 300)))
    assert again["b"] == first["a"] and cached(running, "b") == 256
    assert disk_of(running).counts["hits"] == 4
    running.group.close()


@pytest.mark.parametrize("fault", ["damaged", "dead", "deleted"])
def test_a_bad_disk_means_computing_again_and_never_another_answer(
    llama: Path, tmp_path: Path, restoring: None, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = small(llama, tmp_path)
    first = answer(running, prompt("a", small_tokens(1, 300)))
    running.group.close()
    running = small(llama, tmp_path)
    if fault == "damaged":
        damage(tmp_path)
    elif fault == "deleted":
        for path in tmp_path.glob("*.seg"):
            path.unlink()
    else:

        def dead(*args: object) -> None:
            raise OSError(5, "the device is gone")

        for name in ("read", "write", "sync", "create"):
            monkeypatch.setattr(Files, name, dead)
    assert answer(running, prompt("b", small_tokens(1, 300)))["b"] == first["a"]
    counts = disk_of(running).counts
    assert cached(running, "b") == 0
    assert sum(counts[f"read_{cause}"] for cause in ("checksum", "header", "io", "gone")) > 0
    running.group.close()


def test_a_cancel_while_reading_frees_the_blocks_only_once_they_are_read(
    llama: Path, tmp_path: Path, restoring: None
) -> None:
    running = small(llama, tmp_path)
    answer(running, prompt("a", small_tokens(1, 500)))
    running.group.close()
    expected = answer(small(llama, None), prompt("c", small_tokens(2, 500)))
    running = small(llama, tmp_path, num_blocks=9)
    prefill = running.group.by_name["prefill"].stage
    running.send(prompt("b", small_tokens(1, 500)))
    while not prefill.restoring:  # type: ignore[attr-defined]
        running.turn()
    running.cancel("b")
    assert answer(running, prompt("c", small_tokens(2, 500))) == expected
    while running.pool.num_free < 9:
        running.turn()
    running.group.close()


def test_tenants_share_nothing_on_disk(llama: Path, tmp_path: Path, restoring: None) -> None:
    for salt, expected in (("alice", 0), ("bob", 0), ("alice", 256)):
        running = small(llama, tmp_path)
        one = prompt("a", small_tokens(1, 300))
        one.cache_salt = salt
        answer(running, one)
        assert cached(running, "a") == expected
        running.group.close()


@pytest.mark.parametrize("how", [{"cache_class": "private"}, {"cache_keep_s": 0.0}])
def test_without_retention_nothing_is_stored_anywhere_and_what_is_there_serves(
    llama: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    lookup = {"tiers": {"disk": {"path": str(tmp_path), "size": "64MiB"}}, "retention": {"private": "0"}}
    running = Service(llama, num_blocks=16, lookup=lookup)

    def ask(id: str, **fields: Any) -> list[int]:
        one = prompt(id, small_tokens(1, 300))
        for field, value in fields.items():
            setattr(one, field, value)
        return answer(running, one)[id]

    first = ask("a", **how)
    assert running.pool.num_cached == 0 and ask("b", **how) == first and cached(running, "b") == 0
    assert ask("c") == first and cached(running, "c") == 0 and running.pool.num_cached > 0
    assert ask("d", **how) == first and cached(running, "d") == 256
    store = disk_of(running)
    running.group.close()
    assert store.counts["stored"] == running.pool.num_cached


def test_a_request_shortens_the_retention_of_its_class_and_cannot_exceed_the_longest(
    llama: Path, tmp_path: Path
) -> None:
    running = small(llama, tmp_path)
    for id, seed, keep_s in (("short", 1, 60.0), ("long", 2, 1e9), ("chat", 3, None)):
        one = prompt(id, small_tokens(seed, 200))
        one.cache_keep_s = keep_s
        answer(running, one)
    running.group.close()
    keeps = {entry.keep for entry in entries(tmp_path)}
    assert keeps == {60.0, 7 * 86_400.0}


def test_tiny_pools_shared_prefixes_cancels_and_damage_change_no_token(
    llama: Path, tmp_path: Path, restoring: None
) -> None:
    rng = random.Random(3)
    prefixes = [small_tokens(seed, 200) for seed in range(4)]
    plain, hits = small(llama, None, num_blocks=64), 0
    for number in range(3):
        running = small(llama, tmp_path, num_blocks=14, size="2MiB")
        sizes = [(rng.choice(prefixes)[: rng.randint(60, 200)], rng.randint(1, 80)) for _ in range(10)]
        prompts = [prompt(f"{number}.{n}", [*head, *small_tokens(n, tail)]) for n, (head, tail) in enumerate(sizes)]
        running.send(*prompts)
        running.turn(rng.randint(5, 60))
        gone = {one.id for one in rng.sample(prompts, 3)}
        running.cancel(*gone)
        if number == 2:
            damage(tmp_path)
        got = running.finish(one.id for one in prompts)
        plain.pool.clear_cache()
        expected = answer(plain, *prompts)
        assert {one.id: got[one.id] for one in prompts if one.id not in gone} == {
            id: tokens for id, tokens in expected.items() if id not in gone
        }
        while running.pool.num_free < 14:
            running.turn()
        hits += disk_of(running).counts["hits"]
        running.group.close()
    assert hits > 0


def test_a_second_service_on_the_path_finds_what_the_first_one_stored(
    llama: Path, tmp_path: Path, restoring: None
) -> None:
    one, other = small(llama, tmp_path), small(llama, tmp_path)
    first = answer(one, prompt("a", small_tokens(1, 300)))
    while disk_of(one).counts["stored"] < 4:
        one.turn()
    assert answer(other, prompt("b", small_tokens(1, 300)))["b"] == first["a"] and cached(other, "b") == 256
    one.group.close()
    other.group.close()


def test_a_path_that_cannot_be_used_is_refused_with_the_stage_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StageError, match=r"(?s)prefill.*can't use .*file"):
        small(llama, tmp_path / "file" / "kv")


def test_restoring_is_chosen_by_cost() -> None:
    cost = (8e-3, 4e-4, 3e-7)
    assert worth_restoring(0.1, 4096, 0, cost)
    assert not worth_restoring(0.004, 1, 0, cost)
    assert not worth_restoring(10.0, 4096, 0, cost)


def test_the_speed_of_reads_is_learned_and_what_was_slow_is_tried_again() -> None:
    speed = ReadSpeed(0.03)
    for _ in range(40):
        speed.observe(100 << 20, 0.2 + (100 << 20) / 1e8)
        speed.observe(1 << 10, 0.2)
    assert speed.seconds(100 << 20) == pytest.approx(0.2 + (100 << 20) / 1e8, rel=0.1)
    assert speed.seconds(1 << 10) == pytest.approx(0.2, rel=0.1)
    while speed.seconds(100 << 20) > 0.2:
        speed.declined()
    assert speed.latency_s >= 0.03
