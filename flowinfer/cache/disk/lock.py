"""Lets services share a store, and keeps everybody out while it is changed by hand."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from flowinfer.errors import FlowInferError

LOCK = "lock"
_PATIENCE_S = 2.0  # who changes a store by hand may be about to finish


class StoreLock:
    """A lock on a store: shared by the services that use it, or alone. Raises FlowInferError where it can't be had."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        self.folder = folder
        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH, 0.0 if alone else _PATIENCE_S)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Lets go."""
        os.close(self._fd)

    def _take(self, how: int, patience_s: float) -> None:
        give_up = time.monotonic() + patience_s
        while not _flock(self._fd, how):
            if time.monotonic() >= give_up:
                raise self._refused(how)
            time.sleep(0.01)

    def _refused(self, how: int) -> FlowInferError:
        if how == fcntl.LOCK_EX:
            return FlowInferError(f"a service uses the cache in {self.folder}.", help="Stop it first.")
        return FlowInferError(f"the cache in {self.folder} is being changed by hand.", help="Start again in a moment.")


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
