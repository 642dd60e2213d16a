"""Picks how a test file is run: plain ones as one graph, others as workers in virtual time or as true processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowinfer.testing.checks import Outcome
from flowinfer.testing.file import PipelineTest
from flowinfer.testing.plain import run_over_http, run_plain

__all__ = ["run_inline", "run_over_http"]


def run_inline(path: Path) -> Iterator[Outcome]:
    """Runs a test file in this process. Raises SpecError for mistakes in it."""
    test = PipelineTest.load(path)
    yield from run_plain(test, path)
