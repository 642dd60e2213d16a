"""What a supervisor leaves to the one that takes over: file descriptors with the keeper, its knowledge on disk."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from flowinfer.codec import schema_digest
from flowinfer.runtime.arenas import arena_fds
from flowinfer.runtime.state import State, save

if TYPE_CHECKING:
    from flowinfer.runtime.supervisor import Supervisor

MAX_PAST = 32  # plans that `rollback` can still go back to after a takeover


class Handover:
    """Of one supervisor. Does nothing where there is no keeper."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._num_arenas = 0
        self._is_unsaved = False

    def hold(self) -> None:
        """Has the keeper hold the listening socket, the run directory's lock and the KV memory."""
        supervisor, keeper = self._supervisor, self._supervisor.keeper
        if keeper is None:
            return
        if supervisor.listener is not None:
            keeper.hold("listener", supervisor.listener.fileno())
        keeper.hold("lock", supervisor.run_dir.lock_fd)
        keeper.use(supervisor.run_dir.path)
        for fd in arena_fds(supervisor.arenas):
            self._num_arenas += 1
            keeper.hold(f"arena {os.getpid()} {self._num_arenas}", fd)

    def release_arenas(self) -> None:
        """The keeper lets go of the KV memory as well."""
        fds, keeper = arena_fds(self._supervisor.arenas), self._supervisor.keeper
        if keeper is None:
            return
        for name in [name for name, fd in keeper.fds.items() if fd in fds]:
            keeper.release(name)

    def listen(self) -> None:
        """Hears the keeper from now on."""
        if self._supervisor.keeper is not None:
            self._supervisor.keeper.listen(self._supervisor.channel.wake, self._end_with_keeper)

    def _end_with_keeper(self) -> None:
        """Called in a thread: the keeper has died, so workers end by themselves, and this process must as well."""
        shutil.rmtree(self._supervisor.run_dir.path, ignore_errors=True)
        os._exit(1)

    def save(self) -> None:
        """Writes down what is known now. A disk that is full is told once, and ends nothing."""
        supervisor = self._supervisor
        if supervisor.keeper is None:
            return
        path = supervisor.run_dir.path
        try:
            save(path, self._state())
        except OSError as error:
            if not self._is_unsaved:
                supervisor.say(f"{path} can't be written ({error.strerror}): nobody could take over from here.")
            self._is_unsaved = True
        else:
            self._is_unsaved = False

    def _state(self) -> State:
        supervisor, controller = self._supervisor, self._supervisor.controller
        assert supervisor.keeper is not None
        fds = arena_fds(supervisor.arenas)
        return State(
            plan=supervisor.plan,
            source=controller.source,
            schema=schema_digest(),
            endpoints=supervisor.endpoints,
            children=tuple(child.known() for child in supervisor.children.values()),
            layouts=supervisor.layouts,
            engines=tuple(supervisor.engines),
            arenas=dict(supervisor.arenas),
            spares=tuple(supervisor.arenas.spares),
            fds={fd: name for name, fd in supervisor.keeper.fds.items() if fd in fds},
            last_generation=supervisor.last_generation,
            start_s=supervisor.start_s,
            number=controller.number,
            past=tuple(controller.past[-MAX_PAST:]),
            change=controller.underway,
        )
