"""Events between the supervisor and its workers. Stages never see them."""

from __future__ import annotations

from flowinfer.message import Event

SUPERVISOR = "supervisor"


class Opening(Event):
    """The worker begins to open this stage."""

    stage: str


class Ready(Event):
    """All stages of the worker are open; peers may connect to these endpoints. schema: digest of the message types."""

    data: str
    control: str
    schema: str


class Heartbeat(Event):
    """The worker's loop turns. open_requests: requests that it holds; draining: it knows that no more will come."""

    open_requests: int = 0
    draining: bool = False


class Stop(Event):
    """Close the stages and exit."""
