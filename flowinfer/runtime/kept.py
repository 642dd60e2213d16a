"""A supervisor's side of its keeper: hands over what must outlive it, hears of signals and of orphans that end."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

MAX_MESSAGE = 65_536


class Kept:
    """The link of a supervisor to the keeper that started it.

    fds: what is held for the service, by name. number: of this supervisor, 1 for the first. folder: the run directory
    that its predecessor left, "" for the first. signals: how often the keeper was asked to stop.
    """

    def __init__(
        self,
        link: socket.socket,
        life_fd: int,
        keeper: int,
        number: int,
        folder: str,
        fds: Mapping[str, int],
        exits: Mapping[int, int],
    ) -> None:
        self.life_fd, self.keeper, self.number, self.folder = life_fd, keeper, number, folder
        self.fds, self.exits = dict(fds), dict(exits)
        self.signals = 0
        self._link = link
        self.serves = bool(folder)  # another supervisor would take over from this one

    def listen(self, wake: Callable[[], None], keeper_died: Callable[[], None]) -> None:
        """Hears the keeper from now on, in a thread of its own; `wake` is called on news."""

        def read() -> None:
            while data := self._receive():
                message = json.loads(data)
                if "exited" in message:
                    pid, code = message["exited"]
                    self.exits[pid] = code
                self.signals = message.get("signals", self.signals)
                wake()
            keeper_died()

        threading.Thread(target=read, daemon=True, name="keeper").start()

    def _receive(self) -> bytes:
        try:
            return self._link.recv(MAX_MESSAGE)
        except OSError:
            return b""

    def hold(self, name: str, fd: int) -> None:
        """Has the keeper hold a copy of this file descriptor until `release`."""
        if name not in self.fds:
            self.fds[name] = fd
            socket.send_fds(self._link, [json.dumps({"hold": [name]}).encode()], [fd])

    def release(self, name: str) -> None:
        if self.fds.pop(name, None) is not None:
            self._say(release=name)

    def use(self, folder: Path) -> None:
        """Tells the run directory, which the keeper removes at the end."""
        self._say(folder=str(folder))

    def serving(self) -> None:
        """From now on another supervisor takes over should this one die."""
        if not self.serves:
            self.serves = True
            self._say(serving=True)

    def finish(self) -> None:
        """This supervisor ends, and the service with it: nobody takes over."""
        with contextlib.suppress(OSError):
            self._say(over=True)

    def _say(self, **message: object) -> None:
        self._link.send(json.dumps(message).encode())
