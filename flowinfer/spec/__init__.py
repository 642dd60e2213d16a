"""From YAML to a resolved document: positions, overlays, variables, structure. Leaves types and places to the graph."""

from flowinfer.spec.document import Document, load

__all__ = ["Document", "load"]
