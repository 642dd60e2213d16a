"""The difference of two pipelines, and how a running service would take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.graph import load_plan
from flowinfer.graph.diff import Diff, compare
from flowinfer.graph.plan import Plan, StagePlan
from flowinfer.runtime.loading import load_class
from flowinfer.stage import Stage

PIPELINES = Path(__file__).parents[2] / "pipelines"


def load(stage: StagePlan) -> type[Stage]:
    return load_class(stage.kind)


def prod(*sets: str, overlay: str = "") -> Plan:
    return load_plan(PIPELINES / "prod.yaml", [overlay] if overlay else [], sets)


def diff(*sets: str, overlay: str = "") -> Diff:
    return compare(prod(), prod(*sets, overlay=overlay), load)


def kinds(found: Diff) -> dict[str, str]:
    return {change.path: change.kind for change in found.changes}


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ("stages.route.with.buckets.short=1k", "stages.route.with.buckets.short", "live"),
        ("stages.prefill.with.step_budget=30ms", "stages.prefill.with.step_budget", "live"),
        ("stages.verify.with.draft=none", "stages.verify.with.draft", "live"),
        ("stages.verify.with.tokens=3", "stages.verify.with.tokens", "live"),
        ("stages.lookup.with.wait=5s", "stages.lookup.with.wait", "live"),
        ("serve.max_requests=7", "serve.max_requests", "live"),
        ("serve.drain_timeout=5s", "serve.drain_timeout", "live"),
        ("serve.stop_timeout=5s", "serve.stop_timeout", "live"),
        ('edges."tokenize -> route".capacity=9', 'edges."tokenize -> route".capacity', "live"),
        ("stages.tokenize.with.max_prompt_tokens=1k", "stages.tokenize.with.max_prompt_tokens", "warm"),
        ("stages.decode.with.max_batch=8", "stages.decode.with.max_batch", "warm"),
        ("workers.prefill.replicas=2", "workers.prefill.replicas", "warm"),
        ("stages.transfer.with.transport=tcp", "stages.transfer.with.transport", "cold"),
        ("workers.decode.threads=3", "workers.decode.threads", "cold"),
        ("serve.port=9000", "serve.port", "refused"),
        ("network.transport=tcp", "network", "refused"),
    ],
)
def test_each_setting_has_its_class(value: str, path: str, kind: str) -> None:
    assert kinds(diff(value))[path] == kind


def test_nothing_differs_in_a_file_that_is_only_written_otherwise(tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text("# a comment moves every line\n" + (PIPELINES / "prod.yaml").read_text())
    assert compare(prod(), load_plan(copy), load).changes == ()


def test_a_stage_in_the_front_is_swapped_in_place_and_one_with_weights_with_its_worker() -> None:
    front, worker = diff("stages.tokenize.with.max_prompt_tokens=1k"), diff("stages.decode.with.max_batch=8")
    assert (front.stages(), front.workers()) == ({"tokenize"}, frozenset())
    assert (worker.stages(), worker.workers()) == (frozenset(), {"decode"})


def test_new_bucket_names_are_new_lanes_of_a_queue() -> None:
    found = kinds(diff("stages.route.with.buckets.giant=512k"))
    assert found['edges."lookup -> prefill".lanes'] == "live"


def test_another_model_is_cold_everywhere(tmp_path: Path) -> None:
    found = compare(prod(), prod("vars.model=smollm2-135m"), load)
    assert {change.path for change in found.changes if change.path.endswith(".model")} >= {
        "stages.tokenize.with.model",
        "stages.prefill.with.model",
        "stages.detokenize.with.model",
    }
    assert {change.kind for change in found.changes} == {"cold"}


def test_the_heaviest_change_names_the_class_of_all() -> None:
    assert diff().kind == "live"
    assert diff("stages.verify.with.tokens=3", "workers.prefill.replicas=2").kind == "warm"
    assert diff("stages.verify.with.tokens=3", "serve.port=9000").kind == "refused"


def test_replicas_leave_the_memory_and_threads_of_the_others_as_they_are() -> None:
    paths = kinds(diff("workers.prefill.replicas=3"))
    assert paths == {"workers.prefill.replicas": "warm"}
