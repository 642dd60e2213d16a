"""Which transport an edge with KV gets, by where its ends run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flowinfer.errors import SpecError
from flowinfer.graph import load_plan, transports
from flowinfer.graph.checker import check
from flowinfer.graph.kv_edges import kv_transports
from flowinfer.graph.transports import TRANSPORTS, End, fitting, why_not
from flowinfer.spec import load

PROD = Path(__file__).parents[2] / "pipelines" / "prod.yaml"


@pytest.fixture(autouse=True)
def all_but_nixl_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports.Transport, "is_there", property(lambda self: self.needs == ""))


@pytest.mark.parametrize(
    ("owner", "taker", "wanted"),
    [
        (End("a", "cpu"), End("a", "cpu"), ["local"]),
        (End("a", "cpu"), End("b", "cpu"), ["shm"]),
        (End("a", "cuda:0"), End("b", "cuda:1"), ["cuda_ipc"]),
        (End("a", "cpu"), End("b", "cuda:0"), ["tcp"]),
        (End("a", "auto"), End("b", "auto"), ["shm", "cuda_ipc"]),
        (End("a", "cpu"), End("b", "auto"), ["shm", "tcp"]),
        (End("a", "cpu", "one"), End("b", "cpu", "two"), ["tcp"]),
        (End("a", "cuda:0", "one"), End("b", "cuda:0", "two"), ["tcp"]),
    ],
)
def test_auto_takes_what_fits_both_ends(owner: End, taker: End, wanted: list[str]) -> None:
    assert fitting(owner, taker) == wanted


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_reason_names_both_what_is_and_what_would_do(name: str) -> None:
    reason = why_not(name, End("a", "cpu", "one"), End("b", "cuda:0", "two"))
    assert bool(reason) == (name not in ("tcp", "nixl")) and ("`a`" in reason or not reason)


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ([], ["shm", "cuda_ipc"]),
        (["workers.prefill.device=cpu", "workers.decode.device=cpu"], ["shm"]),
        (["stages.transfer.with.transport=tcp"], ["tcp"]),
        (["stages.prefill.place.worker=decode"], ["local"]),
    ],
)
def test_the_choice_is_told_for_each_edge_with_kv(sets: list[str], wanted: list[str]) -> None:
    graph = check(load(PROD, sets=sets))
    assert {wire.name: kv_transports(graph, wire) for wire in graph.wires if kv_transports(graph, wire)} == {
        "prefill -> transfer": wanted
    }


def test_a_transport_that_the_workers_cannot_have_is_refused_with_both_ends_named() -> None:
    devices = ["workers.prefill.device=cpu", "workers.decode.device=cuda:0", "stages.transfer.with.transport=cuda_ipc"]
    with pytest.raises(SpecError) as refused:
        load_plan(PROD, sets=devices)
    (problem,) = refused.value.problems
    assert problem.code == "FI415" and "`prefill` runs on cpu" in problem.message
    assert [text for _, text in problem.notes] == ["`prefill` runs on cpu", "`decode` runs on cuda:0"]


def by_nixl(*sets: str) -> list[str]:
    return ["stages.transfer.with.transport=nixl", *sets]


def test_nixl_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "nixl" else find(name, *rest))
    with pytest.raises(SpecError) as refused:
        load_plan(PROD, sets=by_nixl("stages.transfer.with.interfaces=[eth0]"))
    (problem,) = refused.value.problems
    assert problem.code == "FI415" and "nixl isn't installed here" in problem.message
    assert problem.help and "flowinfer[nixl]" in problem.help


@pytest.mark.parametrize("sets", [by_nixl(), ["stages.transfer.with.interfaces=[eth0]"]])
def test_nixl_and_its_interfaces_go_together(sets: list[str]) -> None:
    with pytest.raises(SpecError, match="go together"):
        load_plan(PROD, sets=sets)
