"""What lower tiers keep of a model with windows: records of entries and of state, and all that is done with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from windowed import HEAVY, SLIDING, SPARSE, Watched, save_windowed, some_tokens

from flowinfer.cache.disk.offline import entries
from flowinfer.cache.keys import state_name
from flowinfer.cli import main
from flowinfer.errors import ModelError, RequestError
from flowinfer.graph.planner import load_plan
from flowinfer.message import Call, Sampling
from flowinfer.runtime.local import LocalService

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
BLOCKS, SIZE = 6, 128
TOKENS = some_tokens(1, BLOCKS * SIZE + 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_windowed(tmp_path_factory.mktemp("v4"), [SLIDING, SPARSE, HEAVY], window=128)


@pytest.fixture(autouse=True)
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.engine.store_tier.worth_restoring", lambda *args: True)


@pytest.fixture(scope="module")
def cold(model: Path) -> Callable[[list[int]], torch.Tensor]:
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def get(tokens: list[int]) -> torch.Tensor:
        if tuple(tokens) not in found:
            found[tuple(tokens)] = Watched(model, None).ask(tokens)[1]
        return found[tuple(tokens)]

    return get


def live(model: Path, folder: Path | None, tokens: list[int] = TOKENS, max_tokens: int = 6, **more: Any) -> Watched:
    """A life of a service with one prompt."""
    running = Watched(model, folder, **more)
    running.answer = running.ask(tokens, max_tokens)  # type: ignore[attr-defined]
    running.stop()
    return running


def cache(*words: object) -> str:
    result = CliRunner().invoke(main, ["cache", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def check(running: Any, wanted: torch.Tensor, cached: int) -> None:
    torch.testing.assert_close(running.answer[1], wanted, rtol=1e-5, atol=1e-5)
    assert running.end.cached_tokens == cached


def test_state_is_kept_at_the_end_of_the_prompt_and_of_the_output_alone(model: Path, tmp_path: Path) -> None:
    running = live(model, tmp_path, max_tokens=150)
    layout, found = running.engine.layout, {entry.name: entry for entry in entries(tmp_path)}
    names = running.pool.names()
    assert len(names) == BLOCKS + 1
    assert found.keys() == {*names, state_name(names[BLOCKS - 1]), state_name(names[BLOCKS])}
    assert {found[name].length for name in names} == {layout.part_bytes("entries")}
    assert found[state_name(names[-1])].length == layout.part_bytes("state")
    assert {found[name].namespace for name in names} == {layout.digest}


def test_an_export_serves_elsewhere_and_damage_is_found_and_worked_around(
    model: Path, tmp_path: Path, cold: Callable[[list[int]], torch.Tensor]
) -> None:
    live(model, tmp_path / "a")
    assert f"{BLOCKS + 1}" in cache("stats", "--path", tmp_path / "a")
    assert len(cache("ls", "--path", tmp_path / "a").splitlines()) == BLOCKS + 1
    cache("export", "--path", tmp_path / "a", tmp_path / "tar")
    cache("import", "--path", tmp_path / "b", tmp_path / "tar")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    check(live(model, tmp_path / "b"), cold(TOKENS), BLOCKS * SIZE)
    (state,) = [entry for entry in entries(tmp_path / "c") if entry.namespace.endswith("-state")]
    segment = next(path for path in (tmp_path / "c").glob("*.seg") if int(path.stem, 10) == state.segment)
    data = bytearray(segment.read_bytes())
    data[state.offset + 4096 + 100] ^= 1
    segment.write_bytes(data)
    result = CliRunner().invoke(main, ["cache", "verify", "--path", str(tmp_path / "c")])
    assert state.name.hex() in result.output
    check(live(model, tmp_path / "c"), cold(TOKENS), (BLOCKS - 3) * SIZE)


def test_encrypted_records_of_both_kinds_come_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: Callable[[list[int]], torch.Tensor]
) -> None:
    monkeypatch.setenv("KV_KEY", "00" * 32)
    for _ in range(2):
        running = live(model, tmp_path, tiers={"encryption": {"key_env": "KV_KEY"}})
    check(running, cold(TOKENS), BLOCKS * SIZE)


def test_objects_keep_state_too_and_what_one_tier_lacks_another_has(
    model: Path, tmp_path: Path, cold: Callable[[list[int]], torch.Tensor]
) -> None:
    """Entries from disk, the state behind them from the object store, and the other way round."""
    objects = {"object": {"url": f"file://{tmp_path}/objects", "refresh": "1h"}}
    live(model, tmp_path / "kv", tiers=objects)
    for lost in (True, False):
        folder = shutil.copytree(tmp_path / "kv", tmp_path / f"kv {lost}")
        running = Watched(model, folder, tiers=objects)
        removed = [entry.name for entry in entries(folder) if entry.namespace.endswith("-state") is lost]
        assert running.decode.lower.tiers[0].store.remove(removed)
        running.answer = running.ask(TOKENS)  # type: ignore[attr-defined]
        check(running, cold(TOKENS), BLOCKS * SIZE)
        running.stop()


def test_what_is_asked_again_leaves_a_state_where_the_shared_part_ends(
    model: Path, tmp_path: Path, cold: Callable[[list[int]], torch.Tensor]
) -> None:
    """With write: reused, what two prompts have in common is what is kept, and somebody will branch off there."""
    prompts = [[*TOKENS[: 4 * SIZE + 3], *some_tokens(seed, 200)] for seed in range(20, 27)]
    running = Watched(model, tmp_path, tiers={"write": "reused"})
    for tokens in prompts[:6]:
        running.ask(tokens, 2)
        running.settle()
    running.stop()
    check(live(model, tmp_path, prompts[6]), cold(prompts[6]), 4 * SIZE)


def test_arms_that_replay_in_two_ways_dont_share_a_memory(model: Path) -> None:
    running = Watched(model, None, "exact")
    with pytest.raises(ModelError, match="in one arm and `bounded` in the other"):
        running.engine.prefixes.check("bounded")
    running.engine.prefixes.check("exact")


def test_a_file_says_how_hits_are_used(tmp_path: Path) -> None:
    """From YAML to the engine, over a restart, with the model of the package."""
    sets = {
        "vars.model": "flowinfer-mini",
        "stages.prefill.with.dtype": "float32",
        "stages.lookup.with.replay": "bounded",
        "stages.lookup.with.tiers": json.dumps({"memory": "64MiB", "write": "all", "disk": {"path": str(tmp_path)}}),
    }
    first = some_tokens(1, 3 * SIZE + 9, 8192)
    found: list[int] = []
    for tokens in (first, [*first[: 2 * SIZE + 1], *some_tokens(2, 9, 8192)]):
        with LocalService(load_plan(QUICKSTART, sets=[f"{key}={value}" for key, value in sets.items()])) as running:
            sampling = Sampling(max_tokens=2, temperature=0, ignore_eos=True)
            call = Call(id=f"r{len(found)}", prompt=np.array(tokens, np.int32), sampling=sampling)
            pieces = running.generate([call])[call.id]
            assert not isinstance(pieces, RequestError), pieces
            finish = pieces[-1].finish
            assert finish is not None
            found.append(finish.cached_tokens)
    assert found == [0, SIZE]
    assert {entry.namespace.partition("-")[2] for entry in entries(tmp_path)} == {"bounded", "bounded-state"}
