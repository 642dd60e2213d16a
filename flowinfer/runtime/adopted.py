"""A worker process that another process started: watched by a pidfd, asked like a subprocess.Popen."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping

UNKNOWN = 255  # exit code of a process whose reaper hasn't said
REAPER_S = 1.0  # for its reaper to say


class Adopted:
    """One process by its id. exits: exit codes by process id, which its reaper fills in."""

    def __init__(self, pid: int, exits: Mapping[int, int]) -> None:
        self.pid = pid
        self._exits = exits
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code once the process has ended, None before; below 0: minus the signal that ended it."""
        if self._code is None and (self._fd < 0 or select.select([self._fd], [], [], 0)[0]):
            self._code = self._exits.get(self.pid, UNKNOWN)
        return self._code

    def wait(self) -> int:
        """Waits for the end of the process; returns its exit code."""
        if self._fd >= 0:
            select.select([self._fd], [], [])
            os.close(self._fd)
            self._fd = -1
        deadline = time.monotonic() + REAPER_S
        while self.pid not in self._exits and time.monotonic() < deadline:
            time.sleep(0.005)
        self._code = self._exits.get(self.pid, UNKNOWN)
        return self._code

    def send_signal(self, sig: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, sig)
