"""One API request as the gateway runs it: the calls that it became, and how its answer is written. Knows no HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flowinfer.errors import RequestError
from flowinfer.message import Call, Piece
from flowinfer.serve.defaults import Defaults

if TYPE_CHECKING:
    from flowinfer.serve.gateway import GatewayConfig

KEEP_ALIVE = b": keep-alive\n\n"


class Writer(Protocol):
    """Writes an answer: a chat or a completion."""

    def opening(self) -> bytes:
        """Events before the first text."""

    def event(self, index: int, piece: Piece) -> bytes:
        """Events of one piece of choice `index`, its finish_reason included."""

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        """Events after the last choice ended; pieces[i] is the last piece of choice i."""

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """The body of an answer that isn't streamed; pieces[i] is all of choice i."""

    def idle(self) -> bytes:
        """A sign of life while there is nothing to say."""

    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that broke."""


@dataclass(frozen=True)
class Job:
    """A checked request: calls[i] gives choice i."""

    id: str
    calls: list[Call]
    stream: bool
    writer: Writer


@dataclass(frozen=True)
class Limits:
    """What the service allows; from the gateway's settings. defaults: for what requests leave open."""

    models: tuple[str, ...]
    max_requests: int
    default_max_tokens: int
    tools: bool
    defaults: Defaults = field(default_factory=Defaults)

    @classmethod
    def of(cls, config: GatewayConfig, defaults: Defaults | None = None) -> Limits:
        """The limits of a service with these settings; its models' own defaults are read where none are given."""
        if defaults is None:
            defaults = Defaults(config.sampling)
            defaults.read_models(config.models)
        return cls(config.models, config.max_requests, config.default_max_tokens, config.tools, defaults)


SEED_BITS = 63
_STRIDE = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: choices of one seed never meet those of its neighbours


def draw_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(SEED_BITS)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of the k-th choice; choice 0 keeps the seed itself, cut to 63 bits."""
    return (seed + choice * _STRIDE) % (1 << SEED_BITS)
