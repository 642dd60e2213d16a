"""The output file of a batch as a journal: what is in it is done, whatever killed the run before. Knows no requests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from flowinfer.errors import FlowInferError

_NEWLINE = b"\n"


class _Done(msgspec.Struct):
    custom_id: str | None = None
    line: int | None = None


class Journal:
    """Whole lines appended in groups, each group on disk before the next. One process at a time holds it.

    done: the custom_ids, and the numbers of unreadable input lines, that have their line already. A last line
    that a kill has torn is cut off. Raises FlowInferError when the file is in use or isn't such a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str | int] = set()
        self._file: BinaryIO = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FlowInferError(f"{path} is being written by another run.", help="Wait for it, or end it.") from None
        self._recover()

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes lines (each with its newline) and waits until the disk has them."""
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _recover(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(_NEWLINE):
                break
            self._note(number, line)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _note(self, number: int, line: bytes) -> None:
        try:
            done = msgspec.json.decode(line, type=_Done)
        except (msgspec.DecodeError, UnicodeDecodeError):
            done = _Done()
        key = done.custom_id if done.custom_id is not None else done.line
        if key is None:
            self.close()
            message = f"{self.path}:{number} isn't a line of batch output."
            raise FlowInferError(message, help="Give another file with -o.")
        self.done.add(key)
