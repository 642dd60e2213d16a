"""Which block lies where on disk: a SQLite file (WAL) that all processes of a service share. Knows no file operations.

Triggers keep the sums, so that what is held by whom never has to be counted. The index can be lost: see rebuild.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from flowinfer.cache.disk.retention import Candidate, Held

FILE = "index.sqlite"
VERSION = 2  # of the tables; another one is made anew from the segments
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value);
CREATE TABLE IF NOT EXISTS segments (
  id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB, class TEXT, size INTEGER, sealed INTEGER DEFAULT 0,
  live INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS entries (
  name BLOB PRIMARY KEY, namespace TEXT, class TEXT, tenant TEXT, segment INTEGER, offset INTEGER, length INTEGER,
  size INTEGER, expiry REAL, keep REAL, used REAL, hit INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_segment ON entries (segment);
CREATE INDEX IF NOT EXISTS by_expiry ON entries (expiry);
CREATE INDEX IF NOT EXISTS by_use ON entries (class, tenant, used);
CREATE TABLE IF NOT EXISTS usage (class TEXT, tenant TEXT, blocks INTEGER, bytes INTEGER, PRIMARY KEY (class, tenant));
CREATE TRIGGER IF NOT EXISTS counted AFTER INSERT ON entries BEGIN
  INSERT INTO usage VALUES (new.class, new.tenant, 1, new.size)
    ON CONFLICT DO UPDATE SET blocks = blocks + 1, bytes = bytes + new.size;
  UPDATE segments SET live = live + new.size WHERE id = new.segment; END;
CREATE TRIGGER IF NOT EXISTS uncounted AFTER DELETE ON entries BEGIN
  UPDATE usage SET blocks = blocks - 1, bytes = bytes - old.size WHERE class = old.class AND tenant = old.tenant;
  UPDATE segments SET live = live - old.size WHERE id = old.segment; END;
"""
_CHUNK = 500  # names in one IN (...): SQLite takes 999 variables and more


class Entry(NamedTuple):
    """Where a block lies (offset of its header), how long its payload is, and until when it stays.

    keep: seconds that it stays after a use.
    """

    name: bytes
    namespace: str
    cls: str
    tenant: str
    segment: int
    offset: int
    length: int
    size: int
    expiry: float
    keep: float


class Use(NamedTuple):
    """When a block was used, and for how many seconds from then on it is wanted at least."""

    at: float
    keep: float = 0.0


class Usage(NamedTuple):
    """What a tenant holds in a class."""

    cls: str
    tenant: str
    blocks: int
    bytes: int


class SegmentRow(NamedTuple):
    """A segment; live: bytes of records that are still wanted."""

    id: int
    key: bytes
    cls: str
    size: int
    sealed: bool
    live: int


_COLUMNS = "name, namespace, class, tenant, segment, offset, length, size, expiry, keep"


class DiskIndex:
    """Thread-safe; every method is one transaction, and returns once it is durable."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        mode = "ro" if read_only else "rwc"
        self._db = sqlite3.connect(
            f"file:{folder / FILE}?mode={mode}", uri=True, check_same_thread=False, isolation_level=None, timeout=30
        )
        self._lock = threading.RLock()
        if not read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            if self._db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
        if (version := self._db.execute("PRAGMA user_version").fetchone()[0]) != VERSION:
            raise sqlite3.DatabaseError(f"its tables have version {version}, not {VERSION}")
        self._db.execute("SELECT count(*) FROM entries").fetchone()  # reads the table: damage shows now

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, undone if an error leaves the block. Raises OSError where the index can't be written."""
        with self._lock, _as_os_error():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _as_os_error():
            yield self._db

    # ------------------------------------------------------------------------------------------------------- entries

    def add(self, entries: Iterable[Entry], now: float) -> None:
        """Makes blocks visible; one that is there already moves to the new place, and has to be hit there anew."""
        with self.transaction() as db:
            for entry in entries:
                row = db.execute("DELETE FROM entries WHERE name = ? RETURNING used", (entry.name,)).fetchone()
                db.execute(
                    f"INSERT INTO entries ({_COLUMNS}, used) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                    (*entry, row[0] if row else now),
                )

    def find(self, names: Sequence[bytes], namespace: str, now: float) -> dict[bytes, Entry]:
        """Those of the blocks that are there and have not expired."""
        return {e.name: e for e in self._select(names) if e.namespace == namespace and e.expiry > now}

    def renew(self, hits: Mapping[bytes, Use]) -> None:
        """Blocks that were used stay as long again; longer, where the use asks for more than they had."""
        with self.transaction() as db:
            db.executemany(
                "UPDATE entries SET used = max(used, :at), hit = 1, keep = max(keep, :keep), "
                "expiry = max(expiry, :at + max(keep, :keep)) WHERE name = :name",
                [{"at": use.at, "keep": use.keep, "name": name} for name, use in hits.items()],
            )

    def remove(self, names: Sequence[bytes], *, segment: int | None = None) -> list[bytes]:
        """Forgets blocks (only those in `segment`, where one is given); returns those that were there."""
        removed: list[bytes] = []
        with self.transaction() as db:
            for some in _chunks(names):
                where = f"name IN ({_marks(some)})" + ("" if segment is None else f" AND segment = {segment:d}")
                removed += [row[0] for row in db.execute(f"DELETE FROM entries WHERE {where} RETURNING name", some)]
        return removed

    def expire(self, now: float) -> list[bytes]:
        """Forgets what has expired; returns the names."""
        with self.transaction() as db:
            return [row[0] for row in db.execute("DELETE FROM entries WHERE expiry <= ? RETURNING name", (now,))]

    def matching(self, *, cls: str | None = None, tenant: str | None = None) -> Iterator[Entry]:
        """All blocks of a class and a tenant, those used longest ago first."""
        wanted = [column for column, value in (("class", cls), ("tenant", tenant)) if value is not None]
        where = " AND ".join(["1", *(f"{column} = ?" for column in wanted)])
        values = [value for value in (cls, tenant) if value is not None]
        with self._reading() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM entries WHERE {where} ORDER BY used", values).fetchall()
        return (Entry(*row) for row in rows)

    def names(self, namespace: str, now: float) -> list[bytes]:
        """Every block of a namespace that has not expired."""
        with self._reading() as db:
            rows = db.execute("SELECT name FROM entries WHERE namespace = ? AND expiry > ?", (namespace, now))
            return [row[0] for row in rows]

    def usage(self) -> list[Usage]:
        """Blocks and bytes by class and tenant."""
        with self._reading() as db:
            rows = db.execute("SELECT class, tenant, blocks, bytes FROM usage WHERE blocks > 0").fetchall()
        return [Usage(*row) for row in rows]

    def _select(self, names: Sequence[bytes]) -> Iterator[Entry]:
        with self._reading() as db:
            for some in _chunks(names):
                query = f"SELECT {_COLUMNS} FROM entries WHERE name IN ({_marks(some)})"
                yield from [Entry(*row) for row in db.execute(query, some)]

    # ------------------------------------------------------------------------------------------------------ segments

    def new_segment(self, key: bytes, cls: str, size: int) -> int:
        """The number of a new segment. No number is used twice."""
        with self.transaction() as db:
            row = db.execute("INSERT INTO segments (key, class, size) VALUES (?,?,?)", (key, cls, size))
            assert row.lastrowid is not None
            return row.lastrowid

    def restore_segment(self, id: int, key: bytes, cls: str, size: int) -> None:
        """Enters a segment that was found on disk."""
        with self.transaction() as db:
            values = (id, key, cls, size)
            db.execute("INSERT OR REPLACE INTO segments (id, key, class, size, sealed) VALUES (?,?,?,?,1)", values)

    def seal(self, id: int, size: int) -> None:
        """The segment takes no more records; it was cut to `size` bytes."""
        with self.transaction() as db:
            db.execute("UPDATE segments SET sealed = 1, size = ? WHERE id = ?", (size, id))

    def drop_segment(self, id: int) -> list[bytes]:
        """Forgets a segment and what is still in it; returns those names."""
        with self.transaction() as db:
            names = [row[0] for row in db.execute("DELETE FROM entries WHERE segment = ? RETURNING name", (id,))]
            db.execute("DELETE FROM segments WHERE id = ?", (id,))
            return names

    def segments(self) -> list[SegmentRow]:
        """All segments, oldest first."""
        with self._reading() as db:
            rows = db.execute("SELECT id, key, class, size, sealed, live FROM segments ORDER BY id").fetchall()
        return [SegmentRow(id, key, cls, size, bool(sealed), live) for id, key, cls, size, sealed, live in rows]

    def key_of(self, id: int) -> bytes | None:
        """The random key of a segment."""
        with self._reading() as db:
            row = db.execute("SELECT key FROM segments WHERE id = ?", (id,)).fetchone()
        return row[0] if row else None

    def end_of(self, id: int) -> int:
        """Where the last live record of a segment ends; 0 where it has none."""
        with self._reading() as db:
            row = db.execute("SELECT max(offset + size) FROM entries WHERE segment = ?", (id,)).fetchone()
        return row[0] or 0

    def candidate(self, segment: SegmentRow) -> Candidate:
        """What the policy has to know of a segment."""
        with self._reading() as db:
            query = "SELECT name, tenant, size, used, hit FROM entries WHERE segment = ?"
            rows = db.execute(query, (segment.id,)).fetchall()
        return Candidate(
            segment.id,
            segment.size,
            [Held(name, tenant, size, used, bool(hit)) for name, tenant, size, used, hit in rows],
        )

    def allocated(self) -> int:
        """Bytes that all segments take on disk."""
        with self._reading() as db:
            return int(db.execute("SELECT coalesce(sum(size), 0) FROM segments").fetchone()[0])

    # ---------------------------------------------------------------------------------------------------------- time

    def high_water(self) -> float:
        """The latest cache time that any process has written; 0.0 in a new store."""
        with self._reading() as db:
            return self._now(db)

    @property
    def complete(self) -> bool:
        """False in a new index, and in one whose rebuilding was cut short."""
        with self._reading() as db:
            return db.execute("SELECT 1 FROM meta WHERE key = 'complete'").fetchone() is not None

    def set_complete(self) -> None:
        """All segments on disk are known."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('complete', 1)")

    def set_high_water(self, now: float) -> None:
        """Remembers the cache time, so that a clock set back is noticed after a restart."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO meta VALUES ('time', ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)",
                (now,),
            )

    @staticmethod
    def _now(db: sqlite3.Connection) -> float:
        row = db.execute("SELECT value FROM meta WHERE key = 'time'").fetchone()
        return float(row[0]) if row else 0.0


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        raise OSError(errno.ENOSPC if full else errno.EIO, f"disk cache index: {error}") from error


def _chunks(names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(names), _CHUNK):
        yield names[start : start + _CHUNK]


def _marks(names: Sequence[bytes]) -> str:
    return ",".join("?" * len(names))
