"""Events between the supervisor and its workers. Stages never see them."""

from __future__ import annotations

from typing import ClassVar, Literal

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


class Closing(Event):
    """The worker is closing its stages and still needs time for `doing`; comes anew while that lasts."""

    doing: str


class Probe(Event):
    """The message that this producer sent last on the edge was made at `began`, seconds of the host's clock."""

    bulk: ClassVar[bool] = True  # travels behind the message
    edge: str
    began: float


class Census(Event):
    """A supervisor that comes after one that died asks what this worker really runs. Answered by Running."""


class Running(Event):
    """What this worker runs. step: how far change `number` has come here: prepared, switched, drained, "" for none.

    data, control, schema: as in Ready.
    """

    data: str
    control: str
    schema: str
    epoch: int
    number: int = 0
    step: str = ""


class TapAsk(Event):
    """Show messages of this edge to the datagram socket `to`: `limit` of those that match, and of them every 1/sample.

    Ends when it isn't asked for again in time; limit 0 ends it at once. where: as flowinfer.observe.where reads it.
    """

    edge: str
    to: str
    where: str = ""
    limit: int = 1_000_000_000
    sample: float = 1.0


# ------------------------------------------------------------------------------ changes of a running service, by number


class Change(Event):
    """Base of what the supervisor tells workers about a change."""

    number: int


class Prepare(Change):
    """Build what this plan asks of you beside what runs, and say Prepared. plan: a Plan as JSON.

    renew: stages that are replaced even where nothing about them differs.  back: stages that the last change replaced
    and that are still open are taken again.
    """

    plan: bytes
    renew: tuple[str, ...] = ()
    back: bool = False


class Switch(Change):
    """New requests go by the prepared plan from now on, and nothing new to workers in `leaving`. Say Switched."""

    leaving: tuple[str, ...] = ()


class Leavers(Change):
    """To a worker that has just started: these instances are about to go and get nothing new."""

    names: tuple[str, ...]


class Abandon(Change):
    """Forget what was prepared."""


class Hurry(Change):
    """A deadline of the old is over: move the requests that it holds, compute them again elsewhere, or fail them."""

    mode: Literal["handoff", "replay", "abort"] = "abort"


class Count(Change):
    """Tell what you have sent, received and ended. Say Counted."""


class Retire(Change):
    """The change has proved itself. leavers: workers that are gone for good."""


class Prepared(Event):
    """This worker is ready to switch, or why it can't."""

    number: int
    error: str = ""


class Switched(Event):
    """This worker runs the new plan, or why it doesn't."""

    number: int
    error: str = ""


class Drained(Event):
    """Nothing of the old is left here. aborted: requests that were failed at the deadline."""

    number: int
    aborted: int = 0


class Counted(Event):
    """What a worker has sent and received on its edges to and from other workers that live now, in messages.

    sent: edge, consumer, messages.  received: edge, producer, messages, and credit of them that isn't back.
    open: requests that it holds.  layered, left: requests of stages that were replaced in it, and of those, open ones.
    """

    number: int
    sent: tuple[tuple[str, str, int], ...] = ()
    received: tuple[tuple[str, str, int, int], ...] = ()
    open: int = 0
    layered: int = 0
    left: int = 0


class Trouble(Event):
    """A stage broke while its change is on probation."""

    stage: str
    error: str


class Regrant(Event):
    """The credit of a producer's share of an edge grew by `amount`, or shrank where that is negative."""

    edge: str
    lane: str
    amount: int
