"""The disk tier in a service: answers are the same cold, from memory and from disk after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flowinfer.engine import hub
from flowinfer.errors import FlowInferError, ModelError, RequestError
from flowinfer.graph.planner import load_plan
from flowinfer.message import Call, Finish, Sampling
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
