"""`flowinfer plan` without a service: between two files, and for what can't run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.graph import devices

PROD = str(Path(__file__).parents[2] / "pipelines" / "prod.yaml")


def plan(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *args], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_the_classes_of_settings_edges_and_workers() -> None:
    sets = {
        "stages.prefill.with.step_budget": "30ms",
        "serve.sampling.temperature": "0.2",
        "serve.log_level": "debug",
        "workers.decode.log_level": "error",
        "stages.route.with.buckets.short": "1k",
        "workers.prefill.replicas": "2",
        "edges.lookup -> prefill.dispatch": "pull",
        "serve.port": "9000",
    }
    output = plan(PROD, PROD, "--json", *(f"--set={path}={value}" for path, value in sets.items()), code=1)
    kinds = {change["path"]: change["kind"] for change in json.loads(output)["changes"]}
    assert kinds == {
        "stages.prefill.with.step_budget": "live",
        "serve.sampling.temperature": "live",
        "serve.log_level": "live",
        "workers.decode.log_level": "live",
        "stages.route.with.buckets.short": "live",
        "workers.prefill.replicas": "warm",
        'edges."lookup -> prefill".dispatch': "live",
        'edges."lookup -> prefill".lanes': "live",
        'edges."lookup -> prefill".capacity': "live",
        "serve.port": "refused",
    }


def test_the_peak_is_estimated_and_the_gap_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.runtime.arenas.model_layouts", lambda plan, load: {})
    output = plan(PROD, PROD, "--set", "workers.prefill.replicas=2")
    found = re.search(r"memory peak: about (\d+) MiB more while both run; gap for new requests: none", output)
    assert found is not None and int(found[1]) > 500, output  # its half of the memory tier, and weights
    assert "gap for new requests: as long as a start takes" in plan(PROD, PROD, "--set", "workers.decode.threads=3")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("stages.verify.with.tokns=3", "tokns"),  # a setting that no stage has
        ("edges.route -> verify=null", "verify"),  # a type that doesn't fit
        ("stages.prefill.place.worker=nowhere", "nowhere"),
    ],
)
def test_a_file_with_mistakes_is_refused_with_all_of_them(setting: str, words: str) -> None:
    text = plan(PROD, PROD, "--set", setting, code=1)
    assert words in text and "refused  the file can't run; nothing changes." in text
    changes = json.loads(plan(PROD, PROD, "--set", setting, "--json", code=1))["changes"]
    assert changes and {change["kind"] for change in changes} == {"refused"}
    assert any(words in change["how"] for change in changes)


def test_a_model_that_cannot_be_run_here_is_refused() -> None:
    text = plan(PROD, PROD, "--set", "vars.model=/no/such/model", code=1)
    assert re.search(r"refused +stages.prefill .*\n +.*/no/such/model", text), text
    assert "refused: nothing would change" in text


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_cpu_torch", lambda: True)
    devices.count_gpus.cache_clear()
    text = plan(PROD, PROD, "--set", "workers.decode.device=cuda:3", code=1)
    assert re.search(r"refused +workers.decode.device +auto -> cuda:3\n +there is no cuda:3 here", text), text
    devices.count_gpus.cache_clear()
