"""Tiny pools, shared prefixes, cancels, evictions, restarts, damage: the answers are those of a run without a cache.

`pytest -m slow tests/cache/test_tier_fuzz.py` goes on for FLOWINFER_FUZZ_S seconds (300).
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from decode_loop import Service, prompt, save_random_llama
from windowed import SPARSE, counted, save_windowed

from flowinfer.message import Prompt, Serving

VOCAB, NO_CACHE = 96, {"share_inflight": False}
KEEPS: tuple[float | None, ...] = (None, None, None, 60.0, 0.0)


@pytest.fixture(scope="module", params=["dense", "windows"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, or a DeepSeek-V4 whose prefixes are replayed behind three blocks and more."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "windows":
        return save_windowed(folder, [SPARSE, SPARSE], window=20, context=1024)
    save_random_llama(folder, VOCAB, 1024)
    return folder


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


class Fuzz:
    """One seeded run: services over the same two tiers, one after the other, beside a service that caches nothing."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        self.rng, self.model, self.folder = random.Random(seed), model, folder
        self.windows = "windows" in model.name
        self.prefixes = [self.tokens(self.rng.randint(64, 520 if self.windows else 260)) for _ in range(5)]
        self.plain = self.start({})
        self.hits = 0

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(3, VOCAB), k=count)

    def start(self, tiers: dict[str, Any]) -> Service:
        eviction = self.rng.choice(["lru", "density"])
        replay = self.rng.choice(["exact", "exact", "off"])
        lookup = {"tiers": tiers, "eviction": eviction, "replay": replay} if tiers else NO_CACHE
        running = Service(self.model, num_blocks=self.rng.randint(12, 20) if tiers else 160, lookup=lookup)
        running.group.emit(Serving())
        return running

    def tiers(self) -> dict[str, Any]:
        """A disk with room for a few blocks, objects, or both; the encryption stays, or reads would miss."""
        size = self.rng.choice(["2MiB", "8MiB"])
        disk = {"path": str(self.folder / "kv"), "size": size, "segment": "1MiB", "spare": "0"}
        objects = {"url": f"file://{self.folder}/objects", "size": self.rng.choice(["1MiB", "64MiB"])}
        chosen = self.rng.choice([{"disk": disk}, {"object": objects}, {"disk": disk, "object": objects}])
        return chosen | {"write": self.rng.choice(["all", "reused", "auto"])}

    def prompt(self, id: str) -> Prompt:
        head = self.rng.choice(self.prefixes)
        made = prompt(id, [*head[: self.rng.randint(20, len(head))], *self.tokens(self.rng.randint(1, 90))])
        made.cache_keep_s = self.rng.choice(KEEPS)
        made.cache_salt = self.rng.choice(["", "", "alice"])
        return made

    def damage(self) -> None:
        """Turns bits of some of what was written."""
        for path in [*self.folder.rglob("*.seg"), *self.folder.rglob("v1/*/*")]:
            if self.rng.random() < 0.3 and path.stat().st_size > 9000:
                data = bytearray(path.read_bytes())
                data[self.rng.randrange(4096, len(data))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(data)

    def round(self, number: int) -> None:
        """A service's life: answers, cancels, and at its end all blocks free."""
        if self.rng.random() < 0.3:
            self.damage()
        running, size = self.start(self.tiers()), 0
        size = running.pool.num_blocks
        for batch in range(self.rng.randint(1, 3)):
            prompts = [self.prompt(f"{number}.{batch}.{n}") for n in range(self.rng.randint(2, 8))]
            self.answer(running, prompts)
            while running.pool.num_free < size:
                running.turn()
        self.hits += sum(tier.store.counts["hits"] for tier in running.decode.lower.tiers)
        running.group.close()
        assert running.pool.num_free == size and not running.decode.engine.held

    def answer(self, running: Service, prompts: list[Prompt]) -> None:
        """All at once; some are cancelled on the way."""
        running.send(*prompts)
        running.turn(self.rng.randint(1, 80))
        gone = {one.id for one in prompts if self.rng.random() < 0.25}
        running.cancel(*gone)
        kept = [one for one in prompts if one.id not in gone]
        got = running.finish(one.id for one in kept)
        assert got == self.expected(kept)

    def expected(self, prompts: Iterable[Prompt]) -> dict[str, list[int]]:
        again = [prompt(one.id, one.tokens.tolist()) for one in prompts]
        self.plain.send(*again)
        self.plain.pool.clear_cache()
        got = self.plain.finish(one.id for one in again)
        self.plain.pool.clear_cache()
        return got


def test_a_few_rounds(model: Path, tmp_path: Path) -> None:
    fuzz = Fuzz(model, tmp_path, 1)
    for number in range(2 if fuzz.windows else 8):
        fuzz.round(number)
    fuzz.plain.group.close()
    assert fuzz.hits > 0


@pytest.mark.slow
def test_for_minutes(model: Path, tmp_path: Path) -> None:
    end = time.monotonic() + float(os.environ.get("FLOWINFER_FUZZ_S", "300"))
    rounds = hits = 0
    for seed in itertools.count(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fuzz = Fuzz(model, folder, seed)
        for number in range(10):
            fuzz.round(number)
            rounds += 1
        fuzz.plain.group.close()
        hits += fuzz.hits
        if time.monotonic() > end:
            break
    replayed = counted("prefix_replay_tokens_total")
    print(f"{rounds} lives of a service, {hits} blocks restored, {replayed:.0f} tokens replayed")
    assert hits > 0
