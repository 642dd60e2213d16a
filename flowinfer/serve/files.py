"""Uploaded files and the outputs of batches: their cards in the state's tables, their bytes in its folder."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.serve.state import State

CAPACITY = 4 * 2**30  # bytes of all files; uploads beyond are refused
TTL_S = 30 * 24 * 3600.0  # of a file that names no other, as in the OpenAI API
PREFIX = "file-"
_COLUMNS = "id, name, purpose, size, created, tenant, expires"


@dataclass(frozen=True)
class StoredFile:
    """One file of one tenant. created, expires: seconds of wall time."""

    id: str
    name: str
    purpose: str
    size: int
    created: int
    tenant: str
    expires: int

    def card(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Files by id. A name that a client gives is only shown, never used as a path. Time is passed in, as wall time."""

    def __init__(self, state: State, ttl_s: float = TTL_S, capacity: int = CAPACITY) -> None:
        self._state, self._ttl_s, self._capacity = state, ttl_s, capacity
        known = {id for (id,) in state.query("SELECT id FROM files")}
        for name in state.files_on_disk():
            if name.startswith(PREFIX) and name not in known:  # an upload that a crash cut
                self.path(name).unlink(missing_ok=True)

    def new_path(self) -> tuple[str, Path]:
        """An id and where to write its bytes; `add` makes a file of it."""
        id = f"{PREFIX}{uuid.uuid4().hex}"
        return id, self.path(id)

    def add(self, tenant: str, id: str, name: str, purpose: str, now: float, ttl_s: float | None = None) -> StoredFile:
        """Makes a file of what was written to the path of `id`. Raises RequestError 413 beyond the capacity."""
        self.expire(now)
        path = self.path(id)
        size = path.stat().st_size
        (used,) = self._state.query("SELECT coalesce(sum(size), 0) FROM files")[0]
        if size + used > self._capacity:
            path.unlink()
            raise RequestError(413, "There is no room for this file; delete others.", code="storage_full")
        expires = int(now + (self._ttl_s if ttl_s is None else ttl_s))
        file = StoredFile(id, name, purpose, size, int(now), tenant, expires)
        sql = f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._state.query(sql, id, name, purpose, size, file.created, tenant, expires)
        return file

    def get(self, tenant: str, id: str, now: float, param: str | None = None) -> StoredFile:
        """Raises RequestError 404 for what isn't there or is another tenant's."""
        sql = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND expires > ?"
        found = self._state.query(sql, id, tenant, now)
        if not found:
            raise RequestError(404, f"There is no file {id[:80]!r} here.", code="file_not_found", param=param)
        return StoredFile(*found[0])

    def list(self, tenant: str, now: float) -> list[StoredFile]:
        """Newest first."""
        sql = f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND expires > ? ORDER BY number DESC"
        return [StoredFile(*row) for row in self._state.query(sql, tenant, now)]

    def delete(self, tenant: str, id: str, now: float) -> None:
        """Raises RequestError 404 as `get`."""
        self.get(tenant, id, now)
        self._state.query("DELETE FROM files WHERE id = ?", id)
        self.path(id).unlink(missing_ok=True)

    def expire(self, now: float) -> None:
        """Deletes what has expired."""
        for (id,) in self._state.query("DELETE FROM files WHERE expires <= ? RETURNING id", now):
            self.path(id).unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """Where the bytes of a file lie."""
        return self._state.path(id)
