"""Both arms of an experiment as one plan: what is doubled, what is shared, and that each request meets its own arm."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.errors import SpecError
from flowinfer.experiment.policy import place
from flowinfer.graph import load_plan
from flowinfer.graph.diff import compare
from flowinfer.graph.drawing import draw
from flowinfer.graph.join import arm_of, without_experiment
from flowinfer.graph.plan import API, Plan
from flowinfer.message import Call, Piece, Sampling
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.local import LocalService

PIPELINES = Path(__file__).parents[2] / "pipelines"

PARTS = '''
from collections.abc import Iterable

from flowinfer.message import Call, Finish, Piece, Text
from flowinfer.stage import Stage, StageConfig


class Mark(Stage):
    """Writes its name on each call that passes, on a message of its own that has lost its arm."""

    class Config(StageConfig):
        mark: str = ""

    def step(self, calls: list[Call]) -> Iterable[Call]:
        for call in calls:
            yield Call(id=call.id, sampling=call.sampling, prompt=call.prompt + self.config.mark)


class Answer(Stage):
    """Says what is written, all calls in one text."""

    class Config(StageConfig):
        mark: str = ""

    def step(self, calls: list[Call]) -> Iterable[Text]:
        said = [Piece(id=c.id, text=c.prompt + self.config.mark, finish=Finish(reason="stop")) for c in calls]
        yield Text(step=0, pieces=said)


class Sign(Stage):
    """Signs every answer."""

    class Config(StageConfig):
        mark: str = ""

    def step(self, texts: list[Text]) -> Iterable[Text]:
        for text in texts:
            for piece in text.pieces:
                piece.text += self.config.mark
            yield text
'''
CHAIN = ("a", "b", "c", "answer", "d", "e")
KINDS = {"answer": "Answer", "d": "Sign", "e": "Sign"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arms")
    (path / "parts.py").write_text(PARTS)
    return path


def chain(names: list[str], marks: dict[str, str]) -> str:
    """A pipeline of these stages in a row."""
    stages = [f'  {n}: {{use: "./parts.py:{KINDS.get(n[0:6], "Mark")}", with: {{mark: "{marks[n]}"}}}}' for n in names]
    ends = [API, *names, API]
    edges = [f"  {a} -> {b}:" for a, b in pairwise(ends)]
    return "\n".join(["flowinfer: 1", "stages:", *stages, "edges:", *edges, ""])


def answers(plan: Plan, ids: list[str]) -> dict[str, str]:
    """What each of these calls is answered, all asked at once."""
    with LocalService(plan, inline=True) as service:
        got = service.generate([Call(id=id, sampling=Sampling(), prompt=f"{id}:", session=id) for id in ids])
    texts = {}
    for id, pieces in got.items():
        assert isinstance(pieces, list), pieces
        assert sum(piece.finish is not None for piece in pieces) == 1, "one end each"
        texts[id] = "".join(piece.text for piece in pieces if isinstance(piece, Piece))
    return texts


CHANGES = st.dictionaries(st.sampled_from(CHAIN), st.sampled_from(["other", "drop", "capacity"]), min_size=1)


@settings(max_examples=25, deadline=None)
@given(changes=CHANGES, share=st.sampled_from([0.0, 0.3, 1.0]))
def test_each_request_meets_exactly_the_stages_of_its_arm(folder: Path, changes: dict[str, str], share: float) -> None:
    """Whatever arm B changes, drops or connects otherwise: one plan of both answers as two plans would."""
    if changes.get("answer") == "drop":
        changes = changes | {"answer": "other"}  # a graph needs one
    marks = {name: name for name in CHAIN}
    others = [name for name in CHAIN if changes.get(name) != "drop"]
    theirs = {name: name.upper() if changes.get(name) == "other" else name for name in CHAIN}
    a, b = folder / "a.yaml", folder / "b.yaml"
    a.write_text(chain(list(CHAIN), marks))
    b.write_text(chain(others, theirs))
    edges_a, edges_b = (edges_of(names) for names in (list(CHAIN), others))
    over = [f"    {edge}: !drop" for edge in edges_a if edge not in edges_b]
    over += [
        f"    {edge}: {{capacity: 7}}" if changes.get(edge.split()[2]) == "capacity" else f"    {edge}:"
        for edge in edges_b
    ]
    stages = [
        f"    {n}: !drop" if w == "drop" else f"    {n}: {{with: {{mark: {n.upper()}}}}}"
        for n, w in changes.items()
        if w != "capacity"
    ]
    overlay = "\n".join(["  with:", "   stages:" if stages else "   stages: {}", *stages, "   edges:", *over])
    both = folder / "both.yaml"
    both.write_text(f"extends: a.yaml\nexperiment:\n  name: x\n  split: {share}\n{overlay}\n")
    plan_a, plan_b = load_plan(a, allow_local=True), load_plan(b, allow_local=True)
    try:
        plan = load_plan(both, allow_local=True)
    except SpecError as error:
        assert {p.code for p in error.problems} == {"FI322"} and set(changes.values()) == {"capacity"}, error
        return
    ids = [f"r{number}" for number in range(12)]
    expected_a, expected_b = answers(plan_a, ids), answers(plan_b, ids)
    got = answers(plan, ids)
    for id in ids:
        assert got[id] == (expected_b[id] if place(id, "x") < share else expected_a[id])
    assert_projects(plan, plan_a, plan_b)


def edges_of(names: list[str]) -> list[str]:
    ends = [API, *names, API]
    return [f"{a} -> {b}" for a, b in pairwise(ends)]


def assert_projects(plan: Plan, a: Plan, b: Plan) -> None:
    """What one arm's messages meet is that arm's own checked graph, and nothing else."""
    for arm, own in (("a", a), ("b", b)):
        stages, edges = arm_of(plan, arm)
        origin = {name: name.removesuffix("-b") if stage.arm == "b" else name for name, stage in stages.items()}
        assert sorted(origin.values()) == sorted(own.stages)
        found = {(origin[e.source], origin[e.target], e.message, e.port) for e in edges}
        assert found == {(e.source, e.target, e.message, e.port) for e in own.edges}
        for name, stage in stages.items():
            if name != API:
                assert (stage.kind, stage.config) == (own.stages[origin[name]].kind, own.stages[origin[name]].config)


def test_what_must_be_with_a_stage_is_doubled_with_it_and_the_rest_is_shared() -> None:
    plan = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml")
    own = {name: stage.worker for name, stage in plan.stages.items() if stage.arm == "b"}
    assert own == {"transfer-b": "decode-b", "decode-b": "decode-b", "verify-b": "decode-b"}
    shared = {name for name, stage in plan.stages.items() if stage.arm == ""}
    assert shared == {"api", "tokenize", "route", "lookup", "prefill", "detokenize"}
    assert plan.stages["verify-b"].config["draft"] == "none"
    assert {e.name for e in plan.edges if e.arm == "b" and not e.fused} == {
        "prefill -> transfer-b",
        "verify-b -> detokenize",
    }
    assert plan.workers["decode"] == load_plan(PIPELINES / "prod.yaml").workers["decode"]


def test_a_dtype_doubles_all_that_hold_weights_and_what_they_read() -> None:
    plan = load_plan(
        PIPELINES / "quickstart.yaml",
        sets=["experiment={with: {stages: {prefill: {with: {dtype: float32}}}}, mirror: 5%}"],
    )
    own = {name: stage.worker for name, stage in plan.stages.items() if stage.arm == "b"}
    heavy = {"prefill-b", "transfer-b", "decode-b", "verify-b"}
    assert {name for name, worker in own.items() if worker == "front-b"} == heavy
    assert own.keys() - heavy == {"lookup-b"}
    assert plan.stages["decode-b"].config["dtype"] == "float32" and plan.stages["decode"].config["dtype"] == "auto"


def test_shared_workers_hold_both_arms() -> None:
    more = ["experiment.workers=shared"]
    plan = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml", sets=more)
    assert plan.workers.keys() == {"front", "prefill", "decode"}
    assert plan.stages["decode-b"].worker == "decode"


def test_without_its_experiment_a_plan_is_the_one_that_it_was_before() -> None:
    before = load_plan(PIPELINES / "prod.yaml")
    joint = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml")
    after = msgspec.structs.replace(without_experiment(joint), file=before.file)
    assert (after.stages, after.edges) == (before.stages, before.edges)
    assert after.workers == before.workers
    nothing = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml", sets=["experiment=null"])
    assert nothing.digest == after.digest  # so that what was started by the one can be changed by the other


@pytest.mark.parametrize(("sets", "kind"), [((), "warm"), (("experiment.workers=shared",), "cold")])
def test_an_experiment_begins_and_ends_beside_what_runs_where_its_workers_are_its_own(
    sets: tuple[str, ...], kind: str
) -> None:
    before = load_plan(PIPELINES / "prod.yaml")
    joint = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml", sets=sets)
    load = LoadStage(PIPELINES, False)
    assert compare(before, joint, load).kind == kind
    assert compare(joint, without_experiment(joint), load).kind == kind
    wider = load_plan(PIPELINES / "experiments" / "live-no-speculation.yaml", sets=[*sets, "experiment.split=20%"])
    (change,) = compare(joint, wider, load).changes
    assert (change.path, change.kind) == ("experiment", "live")


def test_the_drawing_shows_both_arms() -> None:
    from flowinfer.graph.checker import check
    from flowinfer.spec import load

    text = draw(check(load(PIPELINES / "experiments" / "live-no-speculation.yaml")), "mermaid")
    assert '|"A: Sequence"| s_transfer\n' in text and '|"B: Sequence"| s_transfer_b\n' in text
    assert draw(check(load(PIPELINES / "experiments" / "live-no-speculation.yaml")), "svg").count("B: ") == 5


OVERLAYS = [
    "3",
    "{}",
    "{stages: }",
    "{stages: {verify: !drop }}",
    "{stages: {verify: {use: nothing}}}",
    "{stages: {verify: {with: {draft: none}}}}",
    '{edges: {"a -> b": }}',
    "{edges: [1]}",
    "{workers: {decode: !drop }}",
    "{workers: {decode: {device: cpu, replicas: 3}}}",
    "{vars: {model: x}}",
    "{stages: {api: {use: x}}}",
    "nofile.yaml",
    f"{PIPELINES}/prod.yaml",
    f"{PIPELINES}/experiments/no-speculation.yaml",
    f"{PIPELINES}/experiments/live-no-speculation.yaml",
    "{stages: {verify: {place: {worker: prefill}}}}",
    "{stages: {detokenize: {place: {worker: decode}}}}",
    "{stages: {prefill: {place: {worker: decode}}}}",
    "{stages: {lookup: {with: {eviction: density}}}}",
    "{stages: {prefill: {with: {dtype: float32}}}}",
    "{stages: {detokenize: {with: {model: other}}}}",
]
HOWS = ["split: 10%", "mirror: 0.2", "split: 200%", "split: true", "split: []", "split: 1%, mirror: 1%", "mirror: 100%"]
MORE = [
    "stop_if: {errors: 1}",
    'stop_if: {x: "> 1x"}',
    "stop_if: []",
    "max_open: -1",
    "workers: shared",
    "name: UP",
    "x: y",
]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(OVERLAYS), st.sampled_from(HOWS), st.lists(st.sampled_from(MORE), max_size=2, unique=True))
def test_any_experiment_is_a_plan_or_problems_with_their_places(over: str, how: str, more: list[str]) -> None:
    settings = ", ".join([f"with: {over}", how, *more])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"extends: {PIPELINES}/prod.yaml\nexperiment: {{{settings}}}\n")
        file.flush()
        try:
            plan = load_plan(file.name)
        except SpecError as error:
            assert error.problems and all(problem.mark for problem in error.problems)
            return
    assert plan.experiment is not None and without_experiment(plan).experiment is None
    fused = {edge.name: plan.stages[edge.source].worker == plan.stages[edge.target].worker for edge in plan.edges}
    assert fused == {edge.name: edge.fused for edge in plan.edges} and len(fused) == len(plan.edges)
    assert sorted(name for worker in plan.workers.values() for name in worker.stages) == sorted(plan.stages)
