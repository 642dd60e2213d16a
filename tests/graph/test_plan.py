"""From the shipped files to plans: placement, wiring, inherited models, lanes, and what a plan must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.errors import SpecError
from flowinfer.graph import build_plan, load_plan, planner
from flowinfer.graph.checker import check
from flowinfer.graph.facets import FacetFlow
from flowinfer.graph.plan import Plan
from flowinfer.spec import load

PIPELINES = Path(__file__).parents[2] / "pipelines"
SHIPPED = sorted(path for path in PIPELINES.rglob("*.yaml") if not path.stem.endswith("_test"))


@pytest.fixture(scope="module")
def prod() -> Plan:
    return load_plan(PIPELINES / "prod.yaml")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_right(file: Path) -> None:
    assert load_plan(file).stages


def test_stages_run_where_they_are_placed(prod: Plan) -> None:
    assert {name: worker.stages for name, worker in prod.workers.items()} == {
        "front": ("api", "tokenize", "route", "lookup", "detokenize"),
        "prefill": ("prefill",),
        "decode": ("transfer", "decode", "verify"),
    }


def test_edges_between_workers_are_queues_and_others_calls(prod: Plan) -> None:
    queues = {edge.name for edge in prod.edges if not edge.fused}
    assert queues == {"lookup -> prefill", "prefill -> transfer", "verify -> detokenize"}


def test_types_choose_the_ports(prod: Plan) -> None:
    edges = {edge.name: (edge.message, edge.back) for edge in prod.edges}
    assert edges["verify -> decode"] == ("Proposal", True)
    assert edges["verify -> detokenize"] == ("Tokens", False)


@pytest.mark.parametrize("written", ["[bucket, prefix]", "[prefix, bucket]", "bucket+prefix"])
def test_bucket_and_prefix_go_together_with_a_lane_a_bucket(written: str) -> None:
    plan = load_plan(PIPELINES / "prod.yaml", sets=[f'edges."lookup -> prefill".dispatch={written}'])
    (edge,) = (edge for edge in plan.edges if edge.name == "lookup -> prefill")
    assert edge.dispatch == "bucket+prefix" and edge.lanes == ("short", "medium", "long", "huge")


def test_bucket_dispatch_has_a_lane_a_bucket(prod: Plan) -> None:
    (edge,) = (edge for edge in prod.edges if edge.dispatch == "bucket")
    assert edge.lanes == ("short", "medium", "long", "huge")


def test_a_model_that_is_left_open_is_the_one_named_before(prod: Plan) -> None:
    assert {
        name: stage.config["model"] for name, stage in prod.stages.items() if "model" in stage.config
    } == dict.fromkeys(["tokenize", "lookup", "prefill", "transfer", "decode", "detokenize"], "flowinfer-mini")


def test_settings_in_the_plan_are_complete_and_in_the_notation_of_files(prod: Plan) -> None:
    assert prod.stages["prefill"].config["step_budget"] == "50ms"
    assert prod.stages["lookup"].config["tiers"]["memory"] == "1GiB"


def test_set_reaches_the_plan() -> None:
    plan = load_plan(PIPELINES / "prod.yaml", sets=["vars.prefill_workers=3", "workers.decode.kv_memory=1GiB"])
    assert plan.workers["prefill"].replicas == 3
    assert plan.workers["decode"].kv_bytes == 2**30


def test_digest_names_the_content_and_not_how_it_was_written() -> None:
    one = load_plan(PIPELINES / "prod.yaml")
    same = load_plan(PIPELINES / "prod.yaml", sets=["stages.verify.with.draft=head"])
    other = load_plan(PIPELINES / "prod.yaml", sets=["stages.verify.with.draft=none"])
    assert one.digest == same.digest != other.digest


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (PIPELINES / "prod.yaml").read_text()
    text = text.replace("port: 8000", "prt: 8000").replace("moe-decode", "moe-decod").replace("-> route:", "-> rout:")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_plan(tmp_path / "x.yaml")
    assert [problem.code for problem in caught.value.problems] == ["FI201", "FI206", "FI301"]


def test_facets_count_only_when_every_path_brings_them(tmp_path: Path) -> None:
    text = (PIPELINES / "quickstart.yaml").read_text()
    text = text.replace("lookup -> prefill: {dispatch: bucket}", "lookup -> prefill:\n  tokenize -> prefill:")
    (tmp_path / "x.yaml").write_text(text)
    graph = check(load(tmp_path / "x.yaml"))
    flow = FacetFlow(graph)
    (wire,) = (wire for wire in graph.wires if wire.name == "prefill -> transfer")
    assert flow.of(wire) == {"tokens", "kv"}
    assert [problem.code for problem in graph.problems] == ["FI314"]


def test_stages_can_be_reordered_where_facets_allow(tmp_path: Path) -> None:
    text = (PIPELINES / "quickstart.yaml").read_text()
    text = text.replace("{use: bucket-route}", "{use: bucket-route, with: {by: uncached_tokens}}")
    text = text.replace("tokenize -> route:", "tokenize -> lookup:").replace("route -> lookup:", "lookup -> route:")
    text = text.replace("lookup -> prefill:", "route -> prefill:")
    (tmp_path / "x.yaml").write_text(text)
    assert build_plan(load(tmp_path / "x.yaml")).workers["front"].stages[1:4] == ("tokenize", "lookup", "route")


def test_one_stage_out_of_place_is_one_mistake(tmp_path: Path) -> None:
    text = (PIPELINES / "prod.yaml").read_text().replace("confidence}, place: {with: decode}}", "confidence}}")
    (tmp_path / "x.yaml").write_text(text)
    (problem,) = check(load(tmp_path / "x.yaml")).problems
    assert (problem.code, problem.help) == ("FI407", "Write `place: {with: decode}` in `verify`.")


def test_tcp_off_this_host_with_keys_is_allowed(tmp_path: Path) -> None:
    curve = "curve: {public_key: " + "k" * 40 + ", secret_key_file: key}"
    network = "network: {transport: tcp, bind: 10.0.0.1, " + curve + "}\n"
    (tmp_path / "x.yaml").write_text((PIPELINES / "prod.yaml").read_text() + network)
    assert load_plan(tmp_path / "x.yaml").network.curve_secret_key_file == str(tmp_path / "key")


def test_the_front_knows_whether_a_stage_reads_calls_and_how_chats_are_told() -> None:
    def api(*sets: str) -> dict[str, object]:
        return load_plan(PIPELINES / "prod.yaml", (), sets).stages["api"].config

    assert api()["tools"] is True
    assert api("stages.tokenize.with.tool_parser=none")["tools"] is False
    assert api("stages.tokenize.with.recipe=deepseek-v4")["chat"] == {"recipe": "deepseek-v4"}


@pytest.mark.parametrize(
    ("file", "threads"), [("colocated.yaml", {"engine": 8}), ("prod.yaml", {"prefill": 4, "decode": 4})]
)
def test_cores_are_shared_by_the_processes_that_run_a_model(
    file: str, threads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_num_cores", lambda: 8)
    workers = load_plan(PIPELINES / file).workers
    assert {name: worker.threads for name, worker in workers.items() if name != "front"} == threads
    assert workers["front"].threads == 1
