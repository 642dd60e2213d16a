"""Runs every check over a graph and puts what they find into the order of the file."""

from __future__ import annotations

from flowinfer.errors import Problem
from flowinfer.graph.agreement import check_beside, check_conflicts, check_dispatch, check_fits, check_models
from flowinfer.graph.build import build_graph
from flowinfer.graph.connections import check_answers, check_loops, check_ports
from flowinfer.graph.facets import FacetFlow, check_facets
from flowinfer.graph.invariance import check_invariance
from flowinfer.graph.kv_edges import check_transports
from flowinfer.graph.model import Graph
from flowinfer.graph.placement import check_network, check_wires, check_workers
from flowinfer.graph.weights import check_weights
from flowinfer.spec import Document


def check(document: Document) -> Graph:
    """The graph of a document, with all of its problems; those of both arms where it holds an experiment."""
    graph = check_one(document)
    if document.arm is not None:
        _check_arm(graph, document.arm)
    return graph


def _check_arm(graph: Graph, arm: Document) -> None:
    """Arm B must be a graph of its own, and fit beside arm A."""
    other, said = check_one(arm), {(problem.code, problem.mark) for problem in graph.problems}
    note = (graph.document.mark("experiment"), "in arm B of this experiment")
    for problem in other.problems:
        if (problem.code, problem.mark) not in said:
            graph.problem(problem.code, problem.message, problem.mark, problem.help, [*problem.notes, note])
    if not graph.problems:
        from flowinfer.graph.arms import check_arms

        graph.twin = check_arms(graph, other)
    graph.problems = in_order(graph.problems, list(graph.document.sources))


def check_one(document: Document) -> Graph:
    """The graph of a document, whatever its experiment."""
    graph = build_graph(document)
    check_ports(graph)
    check_loops(graph)
    check_answers(graph)
    check_conflicts(graph)
    check_fits(graph)
    apart = check_beside(graph)
    check_models(graph)
    check_weights(graph)
    check_invariance(graph)
    check_workers(graph)
    check_wires(graph, apart)
    check_network(graph)
    check_transports(graph)
    if graph.is_acyclic() and not any(problem.code == "FI311" for problem in graph.problems):
        # Facets have no beginning in a loop that isn't closed on purpose, and don't pass by a back edge.
        flow = FacetFlow(graph)
        check_facets(graph, flow)
        check_dispatch(graph, flow)
    graph.problems = in_order(graph.problems, list(document.sources))
    return graph


def in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """By file, line and column, each once."""
    place = {file: index for index, file in enumerate(files)}

    def key(problem: Problem) -> tuple[int, int, int, str]:
        mark = problem.mark
        return (place.get(mark.file, 99), mark.line, mark.column, problem.code) if mark else (99, 0, 0, problem.code)

    unread = {problem.mark for problem in problems if problem.code.startswith("FI1")}
    fresh = [p for p in problems if p.code.startswith("FI1") or p.mark not in unread]  # else it follows from the first
    return sorted(dict.fromkeys(fresh), key=key)
