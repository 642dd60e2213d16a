"""The process that a service hangs on: small, does almost nothing, and starts the supervisor anew should that die.

It holds what has to outlive a supervisor: the writing end of the life pipe, by which every worker knows that the
service lives, and the listening socket, KV memory and run directory's lock, which the supervisor hands over. It is the
reaper of the workers that a dead supervisor leaves behind. Linux only; elsewhere the supervisor is on its own, and its
death ends the service.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flowinfer.runtime.kept import MAX_MESSAGE, Kept
from flowinfer.runtime.signals import watched_signals

MAX_DEATHS, WITHIN_S = 5, 60.0  # a supervisor that dies as often ends the service
END_S = 3.0  # for workers to leave by themselves once the life pipe is closed
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1

Serve = Callable[[Kept | None], int]


def keep(serve: Serve, *, max_deaths: int = MAX_DEATHS) -> int:
    """Runs `serve` in a process of its own, again whenever that dies; returns the exit code of the last.

    Forks, so call it before there are threads. In that process `keep` doesn't return: what `serve` gives is its exit
    code.
    """
    if not _adopts_orphans():
        return serve(None)
    return _Keeper(serve, max_deaths).keep()


def _adopts_orphans() -> bool:
    """True when this process now is the parent of processes whose own parent, below it, dies."""
    if not hasattr(os, "pidfd_open") or not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # before Linux 5.3
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class _Keeper:
    def __init__(self, serve: Serve, max_deaths: int) -> None:
        self.serve, self.max_deaths = serve, max_deaths
        self.life_read, self.life_write = os.pipe()
        self.fds: dict[str, int] = {}  # what supervisors gave to be held, by name
        self.exits: dict[int, int] = {}  # exit codes of orphans, by process id
        self.folder = ""
        self.signals = self.num_started = 0
        self.is_serving = self.is_over = False
        self._deaths: deque[float] = deque(maxlen=max_deaths)
        self._socket: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)

    def keep(self) -> int:
        with watched_signals(self._count_signal, self._wake_write) as restore:
            while True:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.num_started += 1
                keeper, pid = os.getpid(), os.fork()
                if pid == 0:
                    ours.close()
                    restore()
                    self._become_supervisor(theirs, keeper)
                theirs.close()
                self._socket = ours
                code = self._watch(pid)
                ours.close()
                if self._is_final(code):
                    self._end()
                    return code if code >= 0 else 128 - code

    def _become_supervisor(self, link: socket.socket, keeper: int) -> NoReturn:
        for fd in (self.life_write, self._wake_read, self._wake_write):
            os.close(fd)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # until it listens to the keeper itself
        if os.getppid() != keeper:
            os._exit(1)
        kept = Kept(link, self.life_read, keeper, self.num_started, self.folder, self.fds, self.exits)
        kept.signals = self.signals
        code = 1
        try:
            code = self.serve(kept)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        kept.finish()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)  # what the caller would do next is the keeper's to do

    def _is_final(self, code: int) -> bool:
        """Whether the service ends with this death of its supervisor; says why it does or doesn't."""
        if self.is_over or self.signals > 1:
            return True
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not self.is_serving:
            _say(f"The controller {how} before the service had started.")
            return True
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == self.max_deaths and now - self._deaths[0] < WITHIN_S:
            _say(f"The controller {how}, the {self.max_deaths}th time within {WITHIN_S:.0f} s: the service ends.")
            return True
        _say(f"The controller {how}. The workers go on; another one takes over.")
        return False

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self, supervisor: int) -> int:
        """Waits for the supervisor's death, holding what it gives and reaping orphans; returns its exit code."""
        assert self._socket is not None
        self._tell(supervisor)
        reading, stop_by = True, math.inf
        while True:
            if self.signals > 1:  # it was to stop at once
                stop_by = min(stop_by, time.monotonic() + END_S)
            if time.monotonic() >= stop_by:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor, signal.SIGKILL)
            patience = None if stop_by == math.inf else max(0.1, stop_by - time.monotonic())
            link = self._socket.fileno()
            ready, _, _ = select.select([self._wake_read, *([link] if reading else [])], [], [], patience)
            if self._wake_read in ready:
                self._drain_wake()
                self._tell(supervisor)
            if link in ready:
                reading = self._take()
            code = self._reap(supervisor)
            if code is not None:
                while reading and select.select([self._socket], [], [], 0)[0]:  # what it said last
                    reading = self._take()
                return code

    def _take(self) -> bool:
        """Does what one message of the supervisor asks; False once there is none to come."""
        assert self._socket is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 16)
        except OSError:
            return False
        if not data:
            return False
        for name, value in json.loads(data).items():
            if name == "hold":
                for key, fd in zip(value, fds, strict=True):
                    os.set_inheritable(fd, False)
                    self.fds[key] = fd
            elif name == "release":
                os.close(self.fds.pop(value))
            elif name == "folder":
                self.folder = value
            elif name == "serving":
                self.is_serving = True
            elif name == "over":
                self.is_over = True
        return True

    def _reap(self, supervisor: int) -> int | None:
        """Ends zombies; returns the supervisor's exit code if it was among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                if ended[0] == supervisor:
                    found = code
                else:
                    self.exits[ended[0]] = code
                    self._send({"exited": [ended[0], code]})
        return found

    def _tell(self, supervisor: int) -> None:
        """Hands on how often a stop was asked for: Ctrl-C reaches both processes, and must count once."""
        self._send({"signals": self.signals})
        if self.signals and not self.is_serving:  # it may not listen yet, as while it fetches a model
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGTERM)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Leaves nothing behind: workers go with the life pipe, those that don't are killed."""
        os.close(self.life_write)
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    select.select([self._wake_read], [], [], deadline - time.monotonic())
                    self._drain_wake()
            for pid in orphans(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            while True:
                os.waitpid(-1, 0)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4_096)

    def _count_signal(self) -> None:
        self.signals += 1


def orphans(parent: int) -> list[int]:
    """Process ids of the children of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
