"""What a test file may expect: of an answer, of an edge, of the whole run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, model_validator

from flowinfer.units import Duration


def _spaced(name: str) -> str:
    """`a->b` as edges are called: `a -> b`."""
    return re.sub(r"\s*->\s*", " -> ", name.strip())


EdgeName = Annotated[str, AfterValidator(_spaced)]


class Strict(BaseModel):
    """Base of all sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Expect(Strict):
    """What must hold of the answer to one case."""

    text: str | None = None
    """Exactly this."""
    contains: str | None = None
    """This is a part of the text."""
    matches: str | None = None
    """A regular expression that is found in the text."""
    finish_reason: str | None = None
    """stop, length or tool_calls."""
    prompt_tokens: int | None = None
    """So many, as `usage` says."""
    completion_tokens: int | None = None
    """So many, as `usage` says."""
    min_cached_tokens: int | None = None
    """At least so many of the prompt's tokens were reused."""
    error: int | Literal["lost"] | None = None
    """The HTTP status of an error; lost: the connection broke without an answer."""
    param: str | None = None
    """The field that the error names."""
    latency: Duration | None = None
    """The answer is whole within this time of the request."""
    first_token: Duration | None = None
    """Its first text comes within this time."""
    where: str | None = None
    """Of a case in a cut: holds for the messages that leave it, as in bucket == 'short' and num_tokens > 10."""

    @model_validator(mode="after")
    def _says_something(self) -> Expect:
        if not self.model_fields_set:
            raise ValueError("expect says nothing, so the case can't fail")
        return self


class EdgeExpect(Strict):
    """What must hold of an edge over the whole run."""

    messages: NonNegativeInt | None = None
    """So many messages passed."""
    order: list[str] | None = None
    """Names of cases, in the order in which they first passed."""
    where: str | None = None
    """Holds for every message, as in num_tokens <= 2048."""


class Bound(Strict):
    """Bounds of a metric, summed over workers."""

    min: float | None = None
    """At least this."""
    max: float | None = None
    """At most this."""


class RunExpect(Strict):
    """What must hold of the whole run."""

    ended: NonNegativeInt | None = None
    """So many cases were answered."""
    failed: NonNegativeInt | None = None
    """So many cases failed."""
    order: list[str] | None = None
    """Names of cases, in the order in which they ended."""
    edges: dict[EdgeName, EdgeExpect] = {}
    """By edge, as in route -> lookup."""
    restarts: dict[str, NonNegativeInt] = {}
    """How often instances were started again, by stage, worker or instance."""
    metrics: dict[str, float | Bound] = {}
    """Metrics by name, without flowinfer:, by how much they grew."""
    latency_p50: Duration | None = None
    """Half of the answers are whole within this time."""
    latency_p95: Duration | None = None
    """95 % of the answers are whole within this time."""
    first_token_p95: Duration | None = None
    """95 % of the answers begin within this time."""
