"""What a supervisor leaves in the run directory for the one that takes over should it die. Plain data.

Each write replaces the file as a whole, so that what is read was true at one time. What runs may have gone on since:
who takes over asks the workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from flowinfer.channel import Endpoints
from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan
from flowinfer.runtime.boot import ArenaRange
from flowinfer.runtime.kept import Kept
from flowinfer.runtime.rewire.protocol import Manner, Source

FILE = "state.json"
ChangeKind = Literal["beside", "restart", "revert"]


class Underway(msgspec.Struct, kw_only=True):
    """A change that isn't over. step: the last one that began.

    kind: `beside` what runs, by a `restart` of all workers, or as a `revert`, back from `old` to the plan before it.
    leaving, born: the instances that go and come with it.  counts: whether `rollback` can take it back.
    """

    number: int
    kind: ChangeKind
    old: Plan
    new: Plan
    source: Source
    step: str = "begin"
    note: str = ""
    leaving: tuple[str, ...] = ()
    born: tuple[str, ...] = ()
    manner: Manner = Manner()
    counts: bool = True


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A worker instance. pid 0: there is no process; started: its start time, since ids are used again."""

    name: str
    worker: str
    replica: int
    generation: int
    epoch: int
    state: Literal["starting", "ready", "down"]
    pid: int = 0
    started: str = ""
    endpoints: Endpoints | None = None
    started_at: float = 0.0  # seconds of the host's monotonic clock, as the others
    ready_at: float = 0.0
    restart_at: float = 0.0
    backoff_s: float = 0.0
    on_trial: bool = False
    leaving: bool = False


class State(msgspec.Struct, kw_only=True):
    """A service as its supervisor last knew it. schema: of the messages that its workers speak.

    fds: names by which the keeper holds the memory files, by the numbers that `arenas` and `spares` use.
    past: plans before this one, newest last.
    """

    plan: Plan
    source: Source
    schema: str
    endpoints: Endpoints
    children: tuple[Known, ...]
    layouts: dict[str, list[KVLayout]]
    engines: tuple[str, ...]
    arenas: dict[str, tuple[ArenaRange, ...]]
    spares: tuple[ArenaRange, ...]
    fds: dict[int, str]
    last_generation: int
    start_s: float
    number: int
    past: tuple[tuple[Plan, Source], ...] = ()
    change: Underway | None = None


def save(folder: Path, state: State) -> None:
    """Replaces the file. Survives the process, not the machine, which takes the workers along."""
    fresh = folder / f"{FILE}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(folder / FILE)


def left_to(keeper: Kept | None) -> State | None:
    """What the predecessor of this supervisor wrote last, None for the first. Raises FlowInferError."""
    if keeper is None or not keeper.folder:
        return None
    path = Path(keeper.folder) / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        message = f"{path} tells nothing of the service: {error}."
        raise FlowInferError(message, help="Start the service anew.") from error
