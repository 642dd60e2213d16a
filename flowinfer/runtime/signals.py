"""Signals for a loop that waits: those that ask for the end are counted, and they and SIGCHLD end its wait."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def watched_signals(count: Callable[[], None], wake_fd: int) -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM call `count`, and each signal writes to wake_fd. Gives what puts all back as it was before.

    In a forked child, call that: the handlers are inherited.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        count()

    def wake(number: int, frame: FrameType | None) -> None:
        return

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGCHLD: wake}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)

    def restore() -> None:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield restore
    finally:
        restore()
