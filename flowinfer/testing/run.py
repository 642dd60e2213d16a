"""Picks how a test file is run: plain ones as one graph, others as workers in virtual time or as true processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowinfer.errors import FlowInferError
from flowinfer.spec.tree import Node
from flowinfer.testing.checks import Outcome, Run, case_outcome, difference, run_problems, text_of
from flowinfer.testing.file import PipelineTest
from flowinfer.testing.inline import InlineRun
from flowinfer.testing.plain import run_over_http as run_plain_over_http
from flowinfer.testing.plain import run_plain
from flowinfer.testing.prepared import Prepared, changed, prepare
from flowinfer.testing.real import RealRun

WHOLE = "the run as a whole"


def run_inline(path: Path) -> Iterator[Outcome]:
    """Runs a test file in this process, with an empty folder for the disk tier. Raises SpecError for mistakes in it."""
    with _empty_disk():
        yield from _run_inline(path)


@contextlib.contextmanager
def _empty_disk() -> Iterator[None]:
    """What the user's cache holds is no matter of a test, and what a test leaves is none of the user's."""
    before = os.environ.get("FLOWINFER_KV")
    with tempfile.TemporaryDirectory(prefix="flowinfer-test-", ignore_cleanup_errors=True) as folder:
        os.environ["FLOWINFER_KV"] = folder
        try:
            yield
        finally:
            del os.environ["FLOWINFER_KV"]
            if before is not None:
                os.environ["FLOWINFER_KV"] = before


def _run_inline(path: Path) -> Iterator[Outcome]:
    test, node = PipelineTest.read(path)
    if test.is_plain:
        yield from run_plain(test, path)
        return
    ready = prepare(test, node, path)
    run = InlineRun(ready.plan, ready.cases, test.faults, test.expect, ready.given).run()
    yield from outcomes(ready, run, _other(test, node, path))


def run_real(path: Path) -> Iterator[Outcome]:
    """Runs a test file over true processes. Raises SpecError for mistakes in it."""
    test, node = PipelineTest.read(path)
    ready = prepare(test, node, path)
    with _empty_disk():  # for the other pipeline, which runs in this process
        yield from outcomes(ready, RealRun(ready, path).run(), _other(test, node, path))


def run_over_http(path: Path, url: str) -> Iterator[Outcome]:
    """Runs a plain test file against a running service. Raises FlowInferError for one that needs its own workers."""
    test = PipelineTest.load(path)
    if not test.is_plain:
        raise FlowInferError(f"{path} changes the service or its workers.", help="Run it inline, or with --real.")
    yield from run_plain_over_http(path, url)


def _other(test: PipelineTest, node: Node, path: Path) -> Run | None:
    """The run of the pipeline that must answer the same, without faults."""
    plan = test.other_plan(path)
    if plan is None:
        return None
    return InlineRun(changed(test, plan, node, path), test.cases).run()


def outcomes(ready: Prepared, run: Run, other: Run | None) -> Iterator[Outcome]:
    """How each case went, and the run as a whole."""
    test = ready.test
    others = {result.name: result for result in other.results} if other else {}
    for case, result in zip(ready.cases, run.results, strict=True):
        outcome = case_outcome(case, result, others.get(case.name), test.equivalent_to or "")
        if case.name in ready.given and (said := text_of(result.body)) != ready.recorded.get(case.name, "nothing"):
            problem = difference("what came out", said, ready.recorded.get(case.name, "nothing"))
            outcome = Outcome(case.name, outcome.text, (*outcome.problems, problem))
        yield outcome
    yield Outcome(WHOLE, "", tuple(run_problems(test.expect, run)))
