"""The grammar of an edge's key: `a -> b`, or `a.output -> b.input`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowinfer.errors import Mark

_END = r"\s*([a-z][a-z0-9_-]*)(?:\.([a-z][a-z0-9_]*))?\s*"
_EDGE = re.compile(rf"{_END}->{_END}")


@dataclass(frozen=True)
class End:
    """One end of an edge: a stage, perhaps its port, and where it stands in the file."""

    stage: str
    port: str | None
    mark: Mark


@dataclass(frozen=True)
class EdgeKey:
    """Both ends of an edge as written."""

    source: End
    target: End

    def __str__(self) -> str:
        return " -> ".join(f"{end.stage}.{end.port}" if end.port else end.stage for end in (self.source, self.target))


def parse_edge(text: str, mark: Mark, quoted: bool = False) -> EdgeKey | None:
    """The ends of `text`, which stands at `mark`; None when it isn't an edge."""
    match = _EDGE.fullmatch(text)
    if match is None:
        return None

    def at(group: int) -> Mark:
        return mark if mark.file == "--set" else mark._replace(column=mark.column + match.start(group) + quoted)

    return EdgeKey(End(match[1], match[2], at(1)), End(match[3], match[4], at(3)))
