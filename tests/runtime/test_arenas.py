"""KV memory that the workers of a host share, and what the supervisor knows of it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import msgspec
import pytest

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError, ModelError, StageError
from flowinfer.graph.plan import Plan, StagePlan, WorkerPlan
from flowinfer.runtime.arenas import (
    SPARE_INSTANCES,
    give_spare_back,
    make_arenas,
    map_arena,
    model_layouts,
    private_arena,
    take_spare,
)
from flowinfer.runtime.boot import ArenaRange, Boot, Report, report_path
from flowinfer.runtime.boots import quarantined
from flowinfer.runtime.child import FIRST_BACKOFF_S, HEALTHY_S, LAST_BACKOFF_S, Child
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8)  # 8 KiB a block


def plan_of(**workers: WorkerPlan) -> Plan:
    stages = {name: StagePlan(name=name, kind="none", config={}, worker=name) for name in workers}
    return Plan(name="test", digest="", file="pipe.yaml", stages=stages, edges=(), workers=workers)


def worker(name: str, blocks: int, replicas: int = 1, device: str = "cpu") -> WorkerPlan:
    return WorkerPlan(name=name, stages=(name,), replicas=replicas, device=device, kv_bytes=blocks * LAYOUT.block_bytes)


def test_instances_of_one_layout_own_ranges_that_do_not_overlap() -> None:
    plan = plan_of(prefill=worker("prefill", 4, replicas=2), decode=worker("decode", 8))
    ranges = make_arenas(plan, {"prefill": [LAYOUT], "decode": [LAYOUT]})
    spans = {name: (share.first_block, share.end_block) for name, (share,) in ranges.items()}
    assert spans == {"prefill.0": (0, 4), "prefill.1": (4, 8), "decode.0": (8, 16)}
    assert {(share.fd, share.num_blocks, share.shared) for (share,) in ranges.values()} == {
        (ranges["decode.0"][0].fd, 16 + SPARE_INSTANCES * 8, True)
    }
    os.close(ranges["decode.0"][0].fd)


def test_what_one_maps_another_sees() -> None:
    ranges = make_arenas(plan_of(a=worker("a", 2), b=worker("b", 2)), {"a": [LAYOUT], "b": [LAYOUT]})
    (one,), (other,) = ranges["a.0"], ranges["b.0"]
    writer, reader = map_arena(one), map_arena(other)
    at = writer.first_block * LAYOUT.block_bytes
    writer.buffer[at : at + 4] = b"kvkv"
    assert (
        bytes(reader.buffer[at : at + 4]) == b"kvkv"
        and len(reader.buffer) == (4 + SPARE_INSTANCES * 2) * LAYOUT.block_bytes
    )
    os.close(one.fd)


def test_layouts_and_devices_have_memory_of_their_own() -> None:
    other = msgspec.structs.replace(LAYOUT, model="n")
    plan = plan_of(a=worker("a", 4), b=worker("b", 4), gpu=worker("gpu", 4, device="cuda:0"))
    ranges = make_arenas(plan, {"a": [LAYOUT, other], "b": [LAYOUT], "gpu": [LAYOUT]})
    assert "gpu.0" not in ranges
    assert [(share.layout.model, share.num_blocks, share.shared) for share in ranges["a.0"]] == [
        ("m", 6 + SPARE_INSTANCES * 4, True),
        ("n", 2 + SPARE_INSTANCES * 2, False),
    ]
    for fd in {share.fd for shares in ranges.values() for share in shares}:
        os.close(fd)


def test_an_instance_that_comes_later_takes_a_spare_range_and_gives_it_back() -> None:
    ranges = make_arenas(plan_of(a=worker("a", 4), b=worker("b", 2)), {"a": [LAYOUT], "b": [LAYOUT]})
    for number in range(1, SPARE_INSTANCES + 1):
        take_spare(ranges, f"a.{number}")
    spans = sorted((share.first_block, share.end_block) for (share,) in ranges.values())
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    with pytest.raises(FlowInferError, match="no more"):
        take_spare(ranges, "a.9")
    give_spare_back(ranges, "a.2")
    take_spare(ranges, "a.9")
    os.close(ranges["a.0"][0].fd)


def test_a_private_arena_fits_the_size() -> None:
    arena = private_arena(LAYOUT, 10 * LAYOUT.block_bytes + 1)
    assert (arena.first_block, arena.end_block, len(arena.buffer)) == (0, 10, 10 * LAYOUT.block_bytes)


def test_blocks_that_others_still_read_are_quarantined_in_the_next_generation() -> None:
    child = Child("front.0", "front", 0)
    child.leases = {"r1": ("decode.0", [3, 4, 9]), "r2": ("decode.0", [8])}
    share = ArenaRange(layout=LAYOUT, fd=0, num_blocks=16, first_block=4, end_block=8)
    assert quarantined(child, share).quarantined == {"r1": ("decode.0", (4,))}


def test_boot_data_survives_json() -> None:
    boot = Boot(
        plan=plan_of(a=worker("a", 1)),
        worker="a",
        replica=0,
        generation=2,
        run_dir="/tmp/x",
        supervisor_data="d",
        supervisor_control="c",
        life_fd=3,
        arenas=(
            ArenaRange(layout=LAYOUT, fd=5, num_blocks=2, first_block=0, end_block=2, quarantined={"r": ("b.0", (1,))}),
        ),
    )
    assert msgspec.json.decode(msgspec.json.encode(boot), type=Boot) == boot


class Ended:
    """A process that is over."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code


def buried(child: Child, now: float, code: int = 1) -> Report:
    child.process = Ended(code)  # type: ignore[assignment]
    return child.buried(now)


def test_restarts_wait_longer_each_time_until_a_worker_stays_healthy() -> None:
    child = Child("a.0", "a", 0)
    waits = []
    for _ in range(12):
        child.state = "starting"
        buried(child, 100.0)
        waits.append(child.restart_at - 100.0)
    assert waits[:3] == pytest.approx([FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S])
    assert waits[-1] == LAST_BACKOFF_S
    child.state, child.ready_at = "ready", 100.0
    buried(child, 100.0 + HEALTHY_S)
    assert child.restart_at == pytest.approx(100.0 + HEALTHY_S + FIRST_BACKOFF_S)


def test_a_report_says_more_than_an_exit_code(tmp_path: Path) -> None:
    child = Child("a.0", "a", 0)
    child.adopt(Ended(1), tmp_path)  # type: ignore[arg-type]
    with report_path(tmp_path, "a.0", 0).open("wb") as file:
        for line in (Report(opening="decode"), Report(error="no such model", help="Pull it.")):
            file.write(msgspec.json.encode(line) + b"\n")
    report = child.buried(0.0)
    assert (report.error, report.help, child.opening) == ("no such model", "Pull it.", "decode")
    assert buried(child, 0.0, -9).error == "worker a.0 was ended by SIGKILL (out of memory?)"


def test_a_model_that_is_not_here_is_told_with_the_stage_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowinfer.engine import hub

    def missing(model: str) -> Path:
        raise ModelError(f"model {model!r} isn't on this machine.", help="Pull it.")

    class Model(Stage):
        class Config(StageConfig):
            def contract(self) -> Contract:
                return Contract(model=ModelUse("small", weights=True))

    monkeypatch.setattr(hub, "resolve", missing)
    plan = plan_of(front=worker("front", 4))
    stage = msgspec.structs.replace(plan.stages["front"], mark="pipe.yaml:7:3")
    plan = msgspec.structs.replace(plan, stages={"front": stage})
    with pytest.raises(StageError, match=r"'front' \(pipe.yaml:7:3\): model 'small' isn't on this machine. Pull it."):
        model_layouts(plan, lambda _: Model)
