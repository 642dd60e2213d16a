"""Replays with prefill and decode in workers of their own: the window travels, and what a block lacks is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from decode_loop import prompt
from windowed import behind, cold, counted

Models = Callable[[str], Path]
Stored = Callable[..., Path]


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it, however fast the small model computes."""
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


@pytest.fixture
def cluster(models: Models, stored: Stored, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def begin(*, shared: bool, tiers: dict[str, Any]) -> Cluster:
        folder = tmp_path / f"sockets {len(made)}"
        folder.mkdir()
        made.append(Cluster(models("two blocks"), folder, shared=shared, lookup={"tiers": tiers}))
        return made[-1]

    yield begin
    for one in made:
        one.close()


@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.slow), False], ids=["shm", "tcp"])
def test_decode_apart_gets_the_window_and_replays_nothing(
    models: Models, stored: Stored, cluster: Callable[..., Cluster], shared: bool
) -> None:
    model = models("two blocks")
    disk = {"path": str(stored("two blocks")), "size": "256MiB", "segment": "1MiB", "spare": "0"}
    tiers, before = {"disk": disk, "write": "all"}, counted("prefix_replay_tokens_total")
    running = cluster(shared=shared, tiers=tiers)
    for id, seed in (("a", 2), ("b", 3)):
        running.send(prompt(id, behind(model, 7, seed), max_tokens=70))
        assert running.finish([id]) == {id: cold(model, behind(model, 7, seed), 70)[0]}
    assert counted("prefix_replay_tokens_total") - before == 4 * 64, "the second one finds whole blocks"


def test_what_another_worker_lacks_is_known_when_its_blocks_are_copied(
    models: Models, stored: Stored, cluster: Callable[..., Cluster]
) -> None:
    """Partial ones come as such: behind the whole ones at their end nothing is replayed, before it a replay is due."""
    model = models("two blocks")
    disk = {"path": str(stored("two blocks")), "size": "256MiB", "segment": "1MiB", "spare": "0"}
    running = cluster(shared=True, tiers={"disk": disk, "write": "reused"})
    running.send(prompt("a", behind(model, 7, 2), max_tokens=4))
    running.finish(["a"])
    running.add("prefill.1")
    running.leave("prefill.0", "handoff")
    shutil.rmtree(disk["path"])
    for id, at, seed, replayed in (("b", 7, 3, 0), ("c", 6, 4, 4)):
        before = counted("prefix_replay_tokens_total")
        running.send(prompt(id, behind(model, at, seed), max_tokens=4))
        assert running.finish([id]) == {id: cold(model, behind(model, at, seed), 4)[0]}
        assert counted("prefix_replay_tokens_total") - before == replayed * 64
    engine = running.engine("prefill.1")  # 5 and 6 came whole, 4 has been made so
    assert [engine.pool.is_partial(name) for name in engine.pool.names()[:7]] == [True] * 4 + [False] * 3
