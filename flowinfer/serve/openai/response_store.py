"""Responses that were asked to be kept, each for its tenant and for a limited time. Time is passed in, as wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.serve.openai.encode import encode
from flowinfer.serve.state import State

TTL_S = 24 * 3600.0
MEMORY_CAPACITY = 64 * 2**20  # bytes of JSON; beyond them the oldest are forgotten early
DISK_CAPACITY = 4 * 2**30


@dataclass
class Stored:
    """A response, and the items of the conversation that led to it, its own output not counted.

    events: its stream as it was sent, of one that was made in the background with a stream.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    events: bytes | None = None


class ResponseStore:
    """Over the tables of a state."""

    def __init__(self, state: State, ttl_s: float = TTL_S, capacity: int | None = None) -> None:
        self._state, self._ttl_s = state, ttl_s
        self._capacity = capacity or (DISK_CAPACITY if state.durable else MEMORY_CAPACITY)
        self._size = self._sum()

    def __len__(self) -> int:
        return int(self._state.query("SELECT count(*) FROM responses")[0][0])

    def put(
        self,
        tenant: str,
        response: dict[str, Any],
        items: list[dict[str, Any]],
        now: float,
        events: bytes | None = None,
    ) -> None:
        """Keeps a response, in place of what was kept by its id. Raises RequestError 503."""
        body, given = encode(response), encode(items)
        size = len(body) + len(given) + len(events or b"")
        self._drop("tenant = ? AND id = ?", tenant, response["id"])
        row = (tenant, response["id"], response["status"], body, given, events, size, now + self._ttl_s)
        self._state.query("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row)
        self._size += size
        self.expire(now)
        while self._size > self._capacity and self._size:
            self._drop("(tenant, id) = (SELECT tenant, id FROM responses ORDER BY expires LIMIT 1)")

    def get(self, tenant: str, id: str, now: float, param: str | None = None) -> Stored:
        """Raises RequestError 404 for what was never kept, is gone, or is another tenant's."""
        sql = "SELECT response, items, events FROM responses WHERE tenant = ? AND id = ? AND expires > ?"
        found = self._state.query(sql, tenant, id, now)
        if not found:
            raise RequestError(404, f"There is no response {id[:80]!r} here.", code="response_not_found", param=param)
        body, items, events = found[0]
        return Stored(msgspec.json.decode(body), msgspec.json.decode(items), events)

    def delete(self, tenant: str, id: str, now: float) -> None:
        """Raises RequestError 404 as `get`."""
        self.get(tenant, id, now)
        self._drop("tenant = ? AND id = ?", tenant, id)

    def expire(self, now: float) -> None:
        """Forgets what has expired."""
        self._drop("expires <= ?", now)

    def fail_unfinished(self, message: str) -> None:
        """Background responses of a service that ended before them have failed."""
        sql = "SELECT tenant, id, response FROM responses WHERE status IN ('queued', 'in_progress')"
        for tenant, id, body in self._state.query(sql):
            error = {"code": "server_error", "message": message}
            response = encode(msgspec.json.decode(body) | {"status": "failed", "error": error})
            sql = "UPDATE responses SET status = 'failed', response = ? WHERE tenant = ? AND id = ?"
            self._state.query(sql, response, tenant, id)

    def _drop(self, where: str, *values: Any) -> None:
        rows = self._state.query(f"DELETE FROM responses WHERE {where} RETURNING size", *values)
        self._size -= sum(size for (size,) in rows)

    def _sum(self) -> int:
        return int(self._state.query("SELECT coalesce(sum(size), 0) FROM responses")[0][0])
