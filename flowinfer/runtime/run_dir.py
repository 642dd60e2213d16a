"""The folder of a running service: sockets, and the process ids of its workers. Sweeps up after services that died."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowinfer.errors import FlowInferError


def root() -> Path:
    """The folder of all services of this user, which nobody else may enter. Raises FlowInferError if not ours."""
    path = Path(tempfile.gettempdir()) / f"flowinfer-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise FlowInferError(f"{path} isn't a private folder of this user.", help="Remove it, or set TMPDIR.")
    return path


class RunDir:
    """The folder of one service; a lock on it tells that the service lives. lock_fd: who has a copy holds it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or root()
        with _locked(parent / ".lock"):
            sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix="", dir=parent))  # mode 0700
            self.lock_fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX)

    @classmethod
    def held(cls, path: Path, lock_fd: int) -> RunDir:
        """The folder of a service that runs, with its lock."""
        found = cls.__new__(cls)
        found.path, found.lock_fd = path, lock_fd
        return found

    def record(self, pid: int) -> None:
        """Notes a worker, so that a later start can end it should everything else fail."""
        with contextlib.suppress(OSError), (self.path / "pids").open("a") as file:  # a full disk is no reason to stop
            file.write(f"{pid} {start_time(pid)}\n")

    def remove_sockets(self, instance: str, generation: int) -> None:
        for lane in ("d", "c"):
            (self.path / f"{instance}.{generation}.{lane}").unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)


def sweep(parent: Path) -> list[Path]:
    """Removes the folders of services that are dead, ending workers that are left; returns them."""
    swept = []
    for path in parent.iterdir():
        if path.is_dir() and _is_stale(path):
            _kill_left(path / "pids")
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def is_alive(path: Path) -> bool:
    """True while the service of this folder lives."""
    return not _is_stale(path)


def _is_stale(path: Path) -> bool:
    try:
        with (path / "lock").open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # half removed: no lock
    return True


def _kill_left(pids: Path) -> None:
    with contextlib.suppress(OSError):
        for line in pids.read_text().splitlines():
            pid, start = line.split(" ", 1)
            if start and start_time(int(pid)) == start:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks, "" where it can't be known: ids are used again, pairs aren't."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
