"""The control socket of a service and its client side. Threads read and write; the supervisor's loop answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.runtime import run_dir
from flowinfer.runtime.rewire.protocol import SERVICE, SOCKET, Reply, Request, Service

MAX_LINE = 16 << 20
REPLY_S = 1.0  # for a client to take a line: the loop doesn't wait for one that has stopped
TAKEOVER_S = 30.0  # for a controller to listen after the death of the one before
Say = Callable[[Reply], None]


class ControlServer:
    """Takes one request a connection. `take` gives those that wait to the loop, each with the way to answer it."""

    def __init__(self, folder: Path, service: Service, wake: Callable[[], None]) -> None:
        self._waiting: deque[tuple[Request, Say]] = deque()
        self._wake = wake
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        (folder / SOCKET).unlink(missing_ok=True)  # that of a predecessor that died
        self._socket.bind(str(folder / SOCKET))
        self._socket.listen(16)
        fresh = folder / f"{SERVICE}.new"
        fresh.write_bytes(msgspec.json.encode(service))
        fresh.replace(folder / SERVICE)
        threading.Thread(target=self._accept, daemon=True, name="control").start()

    def take(self) -> Iterator[tuple[Request, Say]]:
        """Requests that have come since."""
        while self._waiting:
            yield self._waiting.popleft()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._read, args=(connection,), daemon=True, name="control-client").start()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            with connection.makefile("rb") as lines:
                line = lines.readline(MAX_LINE)
            try:
                request = msgspec.json.decode(line, type=Request)
            except msgspec.MsgspecError as error:
                _send(connection, Reply(last=True, ok=False, text=f"the request can't be read: {error}"))
                connection.close()
                return
            connection.settimeout(REPLY_S)
            self._waiting.append((request, lambda reply: _send(connection, reply)))
            self._wake()


def _send(connection: socket.socket, reply: Reply) -> None:
    """Answers; who no longer listens misses it. A client that doesn't read can't hold the loop up: lines are few."""
    with contextlib.suppress(OSError):
        connection.sendall(msgspec.json.encode(reply) + b"\n")
        if reply.last:
            connection.close()


# ------------------------------------------------------------------------------------------------------ the client side


def running() -> list[tuple[Service, Path]]:
    """Services of this user that answer, with their folders."""
    found = []
    for path in sorted(run_dir.root().glob(f"*/{SERVICE}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if run_dir.is_alive(path.parent):
                found.append((msgspec.json.decode(path.read_bytes(), type=Service), path.parent))
    return found


def find(*, file: str = "", service: str = "") -> tuple[Service, Path]:
    """The running service of this name or process id, else the one of this file, else the only one there is.

    Raises FlowInferError that lists what runs.
    """
    services = running()
    if service:
        matching = [found for found in services if service in (found[0].name, str(found[0].pid))]
    else:
        matching = [found for found in services if file and found[0].file == file] or services
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(f"{found.name} (process {found.pid})" for found, _ in matching or services)
    if not services:
        raise FlowInferError("No service is running.", help="Start one: flowinfer run pipelines/prod.yaml.")
    if not matching:
        raise FlowInferError(f"No service {service!r} is running, but {names}.")
    raise FlowInferError(f"Several services are running: {names}.", help="Name one: --service NAME or its process id.")


def _connect(connection: socket.socket, folder: Path) -> None:
    """Connects; waits while the service lives without a controller, as between one that died and the next."""
    deadline = time.monotonic() + TAKEOVER_S
    while True:
        try:
            return connection.connect(str(folder / SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            if time.monotonic() > deadline or not run_dir.is_alive(folder):
                raise
            time.sleep(0.1)


def ask(folder: Path, request: Request) -> Iterator[Reply]:
    """The answer of a service, line by line. Raises FlowInferError when it goes away meanwhile.

    Should only its controller die, what became of the change is told by the one that takes over.
    """
    asked_at, changes = time.time(), request.do in ("apply", "rollback")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _connect(connection, folder)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as lines:
                for line in lines:
                    reply = msgspec.json.decode(line, type=Reply)
                    yield reply
                    if reply.last:
                        return
        except OSError as error:
            if not (isinstance(error, ConnectionResetError) and changes and run_dir.is_alive(folder)):
                raise FlowInferError(f"The service can't be reached: {error.strerror}.") from error
    if changes and run_dir.is_alive(folder):
        from flowinfer.runtime.rewire.follow import follow

        yield from follow(folder, asked_at)
        return
    raise FlowInferError("The service ended before it had answered.", help="`flowinfer history` shows how far it came.")
