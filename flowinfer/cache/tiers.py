"""Settings of the cache tiers, and the decision whether to read a prefix or to compute it again. Moves no bytes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from pydantic import Field, model_validator

from flowinfer.stage import StageConfig
from flowinfer.units import ByteSize, Duration

DISK = "disk"  # the name of the tier as an owner of blocks
RETENTION: dict[str, Duration] = {"agent": 3 * 86_400.0, "chat": 7 * 86_400.0, "default": 3_600.0}
READ_LATENCY_S = 0.003  # from asking to the first block: two hops between threads, an index look-up, a device access


class DiskTierConfig(StageConfig):
    """path: a folder of the cache's own, on a local disk.  size: bytes on disk.  segment: bytes of a segment file.

    class_sizes, tenant_size: bytes that one class, or any one tenant (cache salt), may take of it at most.
    """

    path: str = "~/.cache/flowinfer/kv"
    size: ByteSize = 20 * 2**30
    segment: ByteSize = 2**30
    class_sizes: dict[str, ByteSize] = Field(default_factory=dict)
    tenant_size: ByteSize | None = None


class Tiers(StageConfig):
    """Where blocks are kept, from the nearest to the farthest."""

    memory: ByteSize = 2**30
    disk: DiskTierConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, tiers: Any) -> Any:
        unknown = [name for name in tiers if name not in cls.model_fields] if isinstance(tiers, dict) else []
        if unknown:
            raise ValueError(f"there is no cache tier {unknown[0]!r}; known tiers: {', '.join(cls.model_fields)}")
        return tiers


def tenant_of(salt: str) -> str:
    """The name under which a tenant's blocks are counted: not its salt, which is a secret."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=8).hexdigest() if salt else ""


def worth_restoring(
    num_bytes: int, bytes_per_s: float, num_tokens: int, context: int, cost: tuple[float, float, float]
) -> bool:
    """Whether reading the KV of num_tokens tokens behind `context` others is faster than computing it.

    cost: seconds of a step, a token, a query-key pair (engine.cost.StepTimeModel.coefficients). The step itself isn't
    saved: what follows the prefix needs one.
    """
    _step, b, c = cost
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    return READ_LATENCY_S + num_bytes / bytes_per_s < b * num_tokens + c * pairs
