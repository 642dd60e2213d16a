"""Batches and the answers to their lines, in the state's tables: what is answered once is never asked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.serve.state import State

OUTPUT, ERRORS = "output", "errors"


@dataclass
class Batch:
    """One batch of one tenant; card is what the API shows."""

    tenant: str
    card: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.card["id"])


class BatchStore:
    """Over the tables of a state. Time is passed in, as wall time."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, tenant: str, card: dict[str, Any], expires: float) -> Batch:
        """Keeps a new batch."""
        sql = "INSERT INTO batches (id, tenant, card, open, expires) VALUES (?, ?, ?, 1, ?)"
        self._state.query(sql, card["id"], tenant, msgspec.json.encode(card), int(expires))
        return Batch(tenant, card)

    def save(self, batch: Batch, *, open: bool = True) -> None:
        """Keeps the card as it is now; open: it is still worked on."""
        sql = "UPDATE batches SET card = ?, open = ? WHERE id = ?"
        self._state.query(sql, msgspec.json.encode(batch.card), int(open), batch.id)

    def get(self, tenant: str, id: str) -> Batch:
        """Raises RequestError 404 for what isn't there or is another tenant's."""
        found = self._state.query("SELECT card FROM batches WHERE id = ? AND tenant = ?", id, tenant)
        if not found:
            raise RequestError(404, f"There is no batch {id[:80]!r} here.", code="batch_not_found")
        return Batch(tenant, msgspec.json.decode(found[0][0]))

    def list(self, tenant: str) -> list[dict[str, Any]]:
        """Cards, newest first."""
        rows = self._state.query("SELECT card FROM batches WHERE tenant = ? ORDER BY number DESC", tenant)
        return [msgspec.json.decode(card) for (card,) in rows]

    def unfinished(self) -> Sequence[Batch]:
        """Those that are still to be worked on."""
        rows = self._state.query("SELECT tenant, card FROM batches WHERE open ORDER BY number")
        return [Batch(tenant, msgspec.json.decode(card)) for tenant, card in rows]

    def answer(self, batch: Batch, line: int, kind: str, data: bytes) -> None:
        """Keeps the answer to a line (from 1)."""
        self._state.query("INSERT OR IGNORE INTO batch_lines VALUES (?, ?, ?, ?)", batch.id, line, kind, data)

    def answered(self, batch: Batch) -> dict[int, str]:
        """The lines that have an answer, and its kind."""
        return dict(self._state.query("SELECT line, kind FROM batch_lines WHERE batch = ?", batch.id))

    def write(self, batch: Batch, kind: str, path: Path) -> bool:
        """Writes the answers of a kind, in the order of their lines. False, and no file, where there are none."""
        sql = "SELECT line FROM batch_lines WHERE batch = ? AND kind = ? ORDER BY line"
        lines = [line for (line,) in self._state.query(sql, batch.id, kind)]
        if not lines:
            return False
        sql = "SELECT data FROM batch_lines WHERE batch = ? AND line = ?"  # one by one: all may not fit into memory
        with path.open("wb") as out:
            for line in lines:
                ((data,),) = self._state.query(sql, batch.id, line)
                out.write(data)
        return True

    def forget_lines(self, batch: Batch) -> None:
        """Drops the answers, once they are written out."""
        self._state.query("DELETE FROM batch_lines WHERE batch = ?", batch.id)

    def expire(self, now: float) -> None:
        """Forgets batches that ended long ago."""
        self._state.query("DELETE FROM batches WHERE expires <= ? AND NOT open", now)
