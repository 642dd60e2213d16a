"""The typed graph: from a document to a checked plan. `build_plan` and `load_plan` are the way in."""

from flowinfer.graph.planner import build_plan, load_plan

__all__ = ["build_plan", "load_plan"]
