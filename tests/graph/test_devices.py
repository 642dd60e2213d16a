"""Which GPUs there are is told without torch; what lacks them is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.errors import SpecError
from flowinfer.graph import devices, load_plan
from flowinfer.graph.devices import missing, missing_devices, visible
from flowinfer.graph.diff import Change, compare
from flowinfer.graph.plan import Plan
from flowinfer.runtime.loading import load_class

PROD = Path(__file__).parents[2] / "pipelines" / "prod.yaml"


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-9"}, 2),
        ({"HIP_VISIBLE_DEVICES": "2"}, 1),
    ],
)
def test_what_is_hidden_does_not_count(environ: Mapping[str, str], count: int) -> None:
    assert visible(4, environ) == count


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cpu", 0, ""),
        ("auto", 0, ""),
        ("cuda:0", 1, ""),
        ("cuda:0", 0, "no GPU that torch can use"),
        ("cuda:1", 1, "has only cuda:0"),
        ("cuda:4", 4, "has only cuda:0 to cuda:3"),
    ],
)
def test_a_device_is_there_or_said_to_be_missing(device: str, count: int, words: str) -> None:
    found = missing(device, lambda: count)
    assert words in found and bool(words) == bool(found)


def test_a_cpu_is_never_looked_up() -> None:
    def never() -> int:
        raise AssertionError("asked")

    assert missing_devices(load_plan(PROD), never) == []


def with_gpu(device: str) -> Plan:
    return load_plan(PROD, (), (f"workers.decode.device={device}",))


def changes(old: Plan, new: Plan, count: int) -> list[Change]:
    return [
        change
        for change in compare(old, new, lambda stage: load_class(stage.kind), lambda: count).changes
        if change.path == "workers.decode.device"
    ]


def test_a_change_to_a_missing_device_is_refused_and_to_another_is_cold() -> None:
    cpu, gpu = with_gpu("cpu"), with_gpu("cuda:0")
    (refused,) = changes(cpu, gpu, 0)
    assert refused.kind == "refused" and "there is no cuda:0 here" in refused.how
    assert [change.kind for change in changes(cpu, gpu, 1)] == ["cold"]
    assert changes(gpu, gpu, 0) == []


def test_check_notes_it_and_run_refuses_it_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_cpu_torch", lambda: True)
    devices.count_gpus.cache_clear()
    args = [str(PROD), "--set", "workers.decode.device=cuda:2"]
    checked = CliRunner().invoke(main, ["check", *args])
    assert checked.exit_code == 0 and "note FI414: Worker `decode` can't run: there is no cuda:2" in checked.output
    with pytest.raises(SpecError, match="FI414"):
        devices.refuse_missing(with_gpu("cuda:2"))
    devices.count_gpus.cache_clear()


def test_looking_for_gpus_imports_no_torch() -> None:
    code = "import sys; from flowinfer.graph.devices import count_gpus; count_gpus(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
