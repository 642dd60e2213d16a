"""Who may ask, and how often: API keys, what each may have open and send a minute, its tenant. Pure: time passed in.

Keys are known by their SHA-256 only. Without keys everybody may ask, as one tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from flowinfer.errors import RequestError

KEYS_VARIABLE = "FLOWINFER_API_KEYS"  # keys themselves, separated by commas, beside those of the file


class Access:
    """The keys of a service. requests: open at once for each key.  per_minute: requests that each may send; None: any.

    The rate is a token bucket (generic cell rate algorithm) that holds one minute's worth.
    """

    def __init__(self, keys: Mapping[str, str], *, requests: int | None = None, per_minute: int | None = None) -> None:
        """keys: SHA-256, as 64 hexadecimal digits, by the name of the client."""
        self._names = {digest.lower(): name for name, digest in keys.items()}
        self._requests, self._per_minute = requests, per_minute
        self._open: dict[str, int] = {}
        self._next: dict[str, float] = {}  # when the bucket of each client will be full again

    @classmethod
    def of(cls, keys: Mapping[str, str], variable: str, **limits: int | None) -> Access:
        """With the keys of the environment variable's value added, which are called env-1, env-2, ..."""
        given = [key.strip() for key in variable.split(",") if key.strip()]
        return cls({**keys, **{f"env-{n}": digest_of(key) for n, key in enumerate(given, 1)}}, **limits)

    @property
    def guarded(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._names)

    def client(self, authorization: bytes, api_key: bytes) -> str:
        """The name behind a request's headers (`Authorization: Bearer KEY` or `x-api-key: KEY`); "" without keys.

        Raises RequestError 401.
        """
        if not self._names:
            return ""
        scheme, _, bearer = authorization.partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else api_key.strip()
        # Only digests are compared, so how long a comparison takes says nothing of a key.
        name = self._names.get(hashlib.sha256(key).hexdigest()) if key else None
        if name is None:
            said = (
                "This API key isn't known here." if key else "This service needs an API key: send it as a bearer token."
            )
            raise RequestError(401, said, code="invalid_api_key")
        return name

    def enter(self, client: str, now: float) -> None:
        """Counts a request in. Raises RequestError 429, which says when to come again."""
        if not client:
            return
        if self._requests is not None and self._open.get(client, 0) >= self._requests:
            message = f"{client} has {self._requests} requests open, as many as it may have."
            raise RequestError(429, message, code="too_many_requests", retry_after_s=1.0)
        if self._per_minute is not None:
            interval = 60 / self._per_minute
            full = max(self._next.get(client, 0.0), now) + interval
            if full - now > 60 + 1e-9:
                message = f"{client} may send {self._per_minute} requests a minute."
                raise RequestError(429, message, code="rate_limit_exceeded", retry_after_s=full - now - 60)
            self._next[client] = full
        self._open[client] = self._open.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """Counts a request out."""
        if client:
            self._open[client] -= 1


def digest_of(key: str) -> str:
    """How a key is written in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant_salt(client: str, salt: str) -> str:
    """The cache salt of a client's request. Two clients never share a block, whatever salts they send."""
    if not client:
        return salt
    text = f"{len(client)}:{client}:{salt}"
    return "tenant-" + hashlib.sha256(text.encode()).hexdigest()[:32]
