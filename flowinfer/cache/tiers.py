"""Settings of the cache tiers, and the decision whether to read a prefix or to compute it again. Moves no bytes."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from flowinfer.cache.sealing import EncryptionConfig
from flowinfer.stage import StageConfig
from flowinfer.units import ByteSize, Duration

Write = Literal["auto", "reused", "all"]
DISK, OBJECT = "disk", "object"  # names of tiers as owners of blocks
STORES = frozenset({DISK, OBJECT})
RETENTION: dict[str, Duration] = {"agent": 3 * 86_400.0, "chat": 7 * 86_400.0, "default": 3_600.0}
FIRST_RATE = 1e9  # bytes a second, until reads have been measured
LATENCY_S = {DISK: 0.003, OBJECT: 0.03}  # from asking to the first block, until it has been measured
LEARNING = 0.2  # share of the newest read in what is believed
SECRETS = ("key", "secret", "token", "password", "credential")


class Limits(StageConfig):
    """class_sizes, tenant_size: bytes that one class, or any one tenant (cache salt), may take of a tier at most."""

    class_sizes: dict[str, ByteSize] = Field(default_factory=dict)
    tenant_size: ByteSize | None = None


class DiskTierConfig(Limits):
    """path: a folder of the cache's own, on a local disk; services may share it. Default: ~/.cache/flowinfer/kv.

    size: bytes on disk.  spare: bytes of the device that stay free, however large size is.  segment: bytes of a file.
    """

    path: str | None = None
    size: ByteSize = 20 * 2**30
    spare: ByteSize = 2 * 2**30
    segment: ByteSize = 2**30

    @property
    def folder(self) -> Path:
        """Where the tier lies."""
        return Path(self.path).expanduser() if self.path else default_folder()


class ObjectTierConfig(Limits):
    """url: s3://bucket/prefix, or file:///folder; what else obstore takes.  size: bytes in the store; no limit without.

    options: of the store (endpoint, region, allow_http, ...), by obstore's names. Credentials aren't written here: they
    come from the environment (AWS_ACCESS_KEY_ID, ...), from credentials_file, in the format of ~/.aws/credentials, or
    from the machine's role.  profile: of that file.  timeout: of one request.  refresh: how often the store is listed,
    for what other services have put there and for what has expired.
    """

    url: str
    size: ByteSize | None = None
    options: dict[str, str | bool | int] = Field(default_factory=dict)
    credentials_file: str | None = None
    profile: str = "default"
    timeout: Duration = 10.0
    refresh: Duration = 60.0

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if "://" not in url:
            raise ValueError("a store is named by a URL, as in s3://bucket/prefix or file:///folder")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("credentials don't belong into the file: set them in the environment or credentials_file")
        return url

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if any(word in name.lower() for word in SECRETS):
                raise ValueError(
                    f"{name}: credentials don't belong into the file: set them in the environment or credentials_file"
                )
        return options


class Tiers(StageConfig):
    """Where blocks are kept, from the nearest to the farthest.

    write: what goes to disk and to the object store. `all`: every complete block; `reused`: what a second prompt shows
    to come again; `auto`: what of both finds more at the tier's size.  encryption: of both.
    """

    memory: ByteSize = 2**30
    disk: DiskTierConfig | None = None
    object: ObjectTierConfig | None = None
    write: Write = "auto"
    encryption: EncryptionConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, tiers: Any) -> Any:
        known = cls.model_fields
        unknown = [name for name in tiers if name not in known] if isinstance(tiers, dict) else []
        if unknown:
            raise ValueError(f"there is no cache tier {unknown[0]!r}; known tiers: {', '.join(known)}")
        return tiers


def default_folder() -> Path:
    """Of the disk tier: FLOWINFER_KV, else `kv` in FLOWINFER_CACHE, else ~/.cache/flowinfer/kv, beside the models."""
    if folder := os.environ.get("FLOWINFER_KV"):
        return Path(folder).expanduser()
    return Path(os.environ.get("FLOWINFER_CACHE") or "~/.cache/flowinfer").expanduser() / "kv"


def tenant_of(salt: str) -> str:
    """The name under which a tenant's blocks are counted: not its salt, which is a secret."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=8).hexdigest() if salt else ""


class ReadSpeed:
    """How long a tier takes to give blocks back: latency and rate, learned from its reads. Pure; not thread-safe."""

    def __init__(self, latency_s: float) -> None:
        self._first_latency_s = self.latency_s = latency_s
        self.bytes_per_s = FIRST_RATE

    def seconds(self, num_bytes: int) -> float:
        """Predicted time to read so much."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A read took so long: it tells of the rate, or where that is the smaller part, of the latency."""
        transfer_s = num_bytes / self.bytes_per_s
        if transfer_s < self.latency_s:
            self.latency_s += LEARNING * (max(0.0, seconds - transfer_s) - self.latency_s)
        else:
            rate = num_bytes / max(1e-6, seconds - self.latency_s, seconds / 2)
            self.bytes_per_s += LEARNING * (rate - self.bytes_per_s)

    def declined(self) -> None:
        """It wasn't asked since it is slow: what was slow is tried again one day."""
        self.bytes_per_s = min(self.bytes_per_s * 1.1, FIRST_RATE)
        self.latency_s = max(self.latency_s / 1.1, min(self.latency_s, self._first_latency_s))


def worth_restoring(read_s: float, num_tokens: int, context: int, cost: tuple[float, float, float]) -> bool:
    """Whether reading the KV of num_tokens tokens behind `context` others, in read_s, is faster than computing it.

    cost: seconds of a step, a token, a query-key pair (engine.cost.StepTimeModel.coefficients). The step itself isn't
    saved: what follows the prefix needs one.
    """
    _step, b, c = cost
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    return read_s < b * num_tokens + c * pairs
