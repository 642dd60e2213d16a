"""Tests beside pipelines (`*_test.yaml`): requests, recordings and faults in, expectations out. README.md says how.

What it offers is imported on first use: a worker of a test needs only its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowinfer.testing.checks import Outcome
    from flowinfer.testing.file import PipelineTest
    from flowinfer.testing.run import run_inline, run_over_http, run_real

_HOMES = {"Outcome": "checks", "PipelineTest": "file", "run_inline": "run", "run_over_http": "run", "run_real": "run"}

__all__ = ["Outcome", "PipelineTest", "run_inline", "run_over_http", "run_real"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
