"""The listening socket of the service: bound once by the supervisor, so that clients queue while a front restarts."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import ServePlan

BACKLOG = 1_024


def listen(serve: ServePlan) -> socket.socket:
    """A socket that listens where the file says. Raises FlowInferError that says who has the port and what to do."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((serve.host, serve.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, serve) from error
    return listener


def address(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{port}"


def _explain(error: OSError, serve: ServePlan) -> FlowInferError:
    where = f"{serve.host}:{serve.port}"
    if error.errno == errno.EADDRINUSE:
        help = "Stop it, or choose another port: --set serve.port=8001."
        return FlowInferError(f"{where} is in use{_owner(serve.port)}.", help=help)
    if error.errno == errno.EACCES:
        return FlowInferError(f"{where} needs more rights than you have.", help="Choose a port above 1023.")
    return FlowInferError(f"can't listen on {where}: {error.strerror}.", help="Check serve.host and serve.port.")


def _owner(port: int) -> str:
    """Who listens on a port, as far as this user may know."""
    inodes = set(_listening_inodes(port))
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                if str(fd.readlink()) in inodes:
                    return f" by {(process / 'comm').read_text().strip()} (process {process.name})"
    return ""


def _listening_inodes(port: int) -> list[str]:
    found = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            found += [f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    return found
