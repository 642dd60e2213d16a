"""What the service keeps for its clients, in SQLite and one folder: durable where a folder is named, else as it runs.

All of it is used by the HTTP loop alone. A write costs some 50 µs: the log is synced at checkpoints (WAL), so what the
system has taken outlives the process, and a power cut loses the last moments at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowinfer.errors import FlowInferError, RequestError

VERSION = 1  # of the tables
LOCK_WAIT_S = 10.0  # for a predecessor that is ending
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
  tenant TEXT, id TEXT, status TEXT, response BLOB, items BLOB, events BLOB, size INT, expires REAL,
  PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_expire ON responses (expires);
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, name TEXT, purpose TEXT, size INT, created INT, expires INT
);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, card BLOB, open INT, expires INT
);
CREATE TABLE IF NOT EXISTS batch_lines (
  batch TEXT, line INT, kind TEXT, data BLOB, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""


class State:
    """The tables and the folder of files. path "": in memory and a temporary folder, which end with the service.

    Raises FlowInferError where the folder can't be used, or another service uses it.
    """

    def __init__(self, path: str = "") -> None:
        self.durable = bool(path)
        self._temporary: TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._lock = -1
        try:
            self._db = self._open(path)
            self._check_version()
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise FlowInferError(f"serve.state.path: {path} can't be used: {error}.") from error

    def query(self, sql: str, *values: Any) -> list[Any]:
        """The rows of a statement, which is done when this returns. Raises RequestError 503 where the disk fails."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            message = f"What is to be kept can't be written or read: {error}."
            raise RequestError(503, message, code="storage_failed") from error

    def path(self, file: str) -> Path:
        """Where the bytes of a file lie."""
        if self._folder is None:
            self._temporary = TemporaryDirectory(prefix="flowinfer-files-")
            self._folder = Path(self._temporary.name)
        return self._folder / file

    def files_on_disk(self) -> list[str]:
        """Names of all that lies in the folder."""
        return [] if self._folder is None else [path.name for path in self._folder.iterdir()]

    def close(self) -> None:
        """Ends the use of the folder; others may have it."""
        self._db.close()
        if self._temporary is not None:
            self._temporary.cleanup()
        if self._lock >= 0:
            os.close(self._lock)

    def _open(self, path: str) -> sqlite3.Connection:
        if not path:
            return _connect(":memory:")
        folder = Path(path).expanduser()
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # conversations of others lie here
        self._lock = _locked(folder)
        db = _connect(folder / "state.sqlite")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    def _check_version(self) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found not in (0, VERSION):
            text = f"serve.state.path: its tables are of version {found}, this release reads {VERSION}."
            raise FlowInferError(text, help="Name another folder, or remove this one: what is kept there is lost.")
        self._db.execute(f"PRAGMA user_version = {VERSION}")


def _connect(database: str | Path) -> sqlite3.Connection:
    """Opened in the worker's thread and used in that of HTTP; each statement is a transaction."""
    return sqlite3.connect(database, check_same_thread=False, isolation_level=None)


def _locked(folder: Path) -> int:
    """A lock on the folder, held until it is closed or the process ends. Raises FlowInferError where another has it."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        if time.monotonic() > deadline:
            os.close(lock)
            help = "Give each service a folder of its own."
            raise FlowInferError(f"serve.state.path: another service uses {folder}.", help=help)
        time.sleep(0.1)
