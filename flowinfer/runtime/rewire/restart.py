"""A change that doesn't fit beside what runs: pause admission, drain, start all workers anew, resume.

The listening socket stays open, so clients that come meanwhile wait in its queue. If the new workers can't start, the
old plan's are started instead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.controller import Controller


def restart(controller: Controller, new: Plan) -> None:
    """Runs the new plan in new workers. Raises FlowInferError once the old plan runs again."""
    supervisor, old = controller.supervisor, controller.supervisor.plan
    supervisor.check(new)
    controller.step("pause", "new requests are asked to come again; open ones may end")
    supervisor.drain()
    paused = time.monotonic()
    controller.step("replace", "all workers are started anew")
    supervisor.end(list(supervisor.children.values()), stop=True)
    try:
        supervisor.start_anew(new)
    except FlowInferError as error:
        controller.step("rollback", error.message)
        supervisor.end(list(supervisor.children.values()))
        supervisor.start_anew(msgspec.structs.replace(old, epoch=new.epoch + 1))
        raise FlowInferError(f"{error.message} The service runs as before.", help=error.help) from error
    controller.step("resume", f"after {time.monotonic() - paused:.1f} s")
