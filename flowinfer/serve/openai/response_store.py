"""Responses that were asked to be kept, in memory, each for its tenant and for a limited time. Pure: time passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.serve.openai.encode import encode

TTL_S = 24 * 3600.0
CAPACITY = 64 * 2**20  # bytes of JSON; beyond them the oldest are forgotten early


@dataclass
class Stored:
    """A response, and the conversation that led to it, its own output not counted."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    expires: float
    size: int = field(default=0)


class ResponseStore:
    """Newest last."""

    def __init__(self, ttl_s: float = TTL_S, capacity: int = CAPACITY) -> None:
        self._ttl_s, self._capacity, self._size = ttl_s, capacity, 0
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response: dict[str, Any], messages: list[dict[str, Any]], now: float) -> None:
        """Keeps a response, in place of what was kept by its id."""
        self._drop((tenant, response["id"]))
        entry = Stored(response, messages, now + self._ttl_s, len(encode((response, messages))))
        self._kept[tenant, response["id"]] = entry
        self._size += entry.size
        while self._kept and (self._size > self._capacity or next(iter(self._kept.values())).expires <= now):
            self._drop(next(iter(self._kept)))

    def get(self, tenant: str, id: str, now: float, param: str | None = None) -> Stored:
        """Raises RequestError 404 for what was never kept, is gone, or is another tenant's."""
        entry = self._kept.get((tenant, id))
        if entry is None or entry.expires <= now:
            raise RequestError(404, f"There is no response {id[:80]!r} here.", code="response_not_found", param=param)
        return entry

    def delete(self, tenant: str, id: str, now: float) -> None:
        """Raises RequestError 404 as `get`."""
        self.get(tenant, id, now)
        self._drop((tenant, id))

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._kept.pop(key, None)
        self._size -= entry.size if entry else 0
