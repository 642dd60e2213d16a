"""The typed graph: from a document to a checked plan. `build_plan` and `load_plan` are the way in.

They are imported on first use: a worker process needs only `graph.plan`, not YAML and the checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowinfer.graph.planner import build_plan, load_plan

__all__ = ["build_plan", "load_plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowinfer.graph import planner

    return getattr(planner, name)
