"""Lets the processes of one service share a store, and no other service: two would evict each other's blocks."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from flowinfer.errors import FlowInferError

LOCK = "lock"
_PATIENCE_S = 2.0  # the first process holds the lock alone for the time of one small write


class ServiceLock:
    """A shared lock on a store in the name of one service. `service` is the same in all its processes."""

    def __init__(self, folder: Path, service: str) -> None:
        self.folder, self.service = folder, service
        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Lets go; the store is free once every process of the service has."""
        os.close(self._fd)

    def _take(self) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            if _flock(self._fd, fcntl.LOCK_EX):  # nobody has it: it becomes ours
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, self.service.encode(), 0)
                _flock(self._fd, fcntl.LOCK_SH)
            elif not _flock(self._fd, fcntl.LOCK_SH):
                if time.monotonic() < give_up:
                    time.sleep(0.01)
                    continue
                raise self._refused()
            if os.pread(self._fd, 4096, 0).decode(errors="replace") == self.service:
                return
            _flock(self._fd, fcntl.LOCK_UN)
            raise self._refused()

    def _refused(self) -> FlowInferError:
        holder = os.pread(self._fd, 4096, 0).decode(errors="replace")
        return FlowInferError(
            f"another service ({holder or 'unknown'}) keeps its cache in {self.folder}.",
            help="Stop it, or give this one another `tiers.disk.path`.",
        )


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
