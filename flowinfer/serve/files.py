"""Uploaded files and the outputs of batches, in a folder that lives as long as the service."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowinfer.errors import RequestError

CAPACITY = 4 * 2**30  # bytes of all files; uploads beyond are refused


@dataclass(frozen=True)
class StoredFile:
    """One file of one tenant."""

    id: str
    name: str
    purpose: str
    size: int
    created: int
    tenant: str

    def card(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Files by id. A name that a client gives is only shown, never used as a path."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._capacity, self._files = capacity, dict[str, StoredFile]()

    def new_path(self) -> tuple[str, Path]:
        """An id and where to write its bytes; `add` makes a file of it."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="flowinfer-files-")
        id = f"file-{uuid.uuid4().hex}"
        return id, Path(self._folder.name) / id

    def add(self, tenant: str, id: str, name: str, purpose: str) -> StoredFile:
        """Makes a file of what was written to the path of `id`. Raises RequestError 413 beyond the capacity."""
        path = self.path(id)
        size = path.stat().st_size
        if size + sum(file.size for file in self._files.values()) > self._capacity:
            path.unlink()
            raise RequestError(413, "There is no room for this file; delete others.", code="storage_full")
        self._files[id] = StoredFile(id, name, purpose, size, int(time.time()), tenant)
        return self._files[id]

    def get(self, tenant: str, id: str, param: str | None = None) -> StoredFile:
        """Raises RequestError 404 for what isn't there or is another tenant's."""
        file = self._files.get(id)
        if file is None or file.tenant != tenant:
            raise RequestError(404, f"There is no file {id[:80]!r} here.", code="file_not_found", param=param)
        return file

    def list(self, tenant: str) -> list[StoredFile]:
        """Newest first."""
        return [file for file in reversed(self._files.values()) if file.tenant == tenant]

    def delete(self, tenant: str, id: str) -> None:
        """Raises RequestError 404 as `get`."""
        self.get(tenant, id)
        del self._files[id]
        self.path(id).unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """Where the bytes of a file lie."""
        assert self._folder is not None, "a file exists only once the folder does"
        return Path(self._folder.name) / id
