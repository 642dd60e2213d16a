"""Each shipped pipeline against its test file, inline and, for the distributed one, over HTTP in true processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import ROOT, Service, service

from flowinfer.testing import PipelineTest, run_inline, run_over_http, run_real

FILES = sorted((ROOT / "pipelines").rglob("*_test.yaml"))


def test_every_pipeline_has_a_test() -> None:
    pipelines = [path for path in (ROOT / "pipelines").rglob("*.yaml") if not path.stem.endswith("_test")]
    assert [path for path in pipelines if not path.with_name(f"{path.stem}_test.yaml").exists()] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_inline(path: Path, smollm2: Path) -> None:
    outcomes = list(run_inline(path))
    assert {o.name: o.problems for o in outcomes if o.problems} == {}
    assert outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prod_faults_test", "prod_disk_test", "quickstart_test"])
def test_over_true_processes(name: str, smollm2: Path) -> None:
    outcomes = list(run_real(ROOT / "pipelines" / f"{name}.yaml"))
    assert {o.name: o.problems for o in outcomes if o.problems} == {}
    assert outcomes


def test_over_http_in_three_processes() -> None:
    path = ROOT / "pipelines" / "prod_test.yaml"
    settings = [f"{key}={value}" for key, value in PipelineTest.load(path).set.items()]
    with service("prod.yaml", *settings) as running:
        outcomes = list(run_over_http(path, f"http://127.0.0.1:{running.port}"))
    assert {o.name: o.problems for o in outcomes if o.problems} == {}


def test_kv_travels_as_frames_where_memory_isnt_shared(frames: Service) -> None:
    path = ROOT / "pipelines" / "prod_test.yaml"
    outcomes = list(run_over_http(path, f"http://127.0.0.1:{frames.port}"))
    assert {o.name: o.problems for o in outcomes if o.problems} == {}
