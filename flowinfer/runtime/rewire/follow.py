"""What became of a change whose controller died before it had answered: read from the one that took over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from flowinfer.errors import FlowInferError
from flowinfer.runtime import run_dir
from flowinfer.runtime.rewire.journal import OVER
from flowinfer.runtime.rewire.protocol import Reply, Request, Step

LOOK_S = 0.2
TAKEOVER_S = 60.0  # for another controller to listen


def follow(folder: Path, since: float) -> Iterator[Reply]:
    """The steps that the journal has gained since that time, up to the last of the change.

    Raises FlowInferError when the service is over, or nobody takes over.
    """
    deadline, shown = time.monotonic() + TAKEOVER_S, 0
    yield Reply(text="The controller died; another one takes over.")
    while True:
        steps = [step for step in _history(folder) if step.at >= since]
        begun = [i for i, step in enumerate(steps) if step.step == "takeover"]
        news = steps[begun[0] :] if begun else []
        for step in news[shown:]:
            if step.step in OVER:
                yield _outcome(folder, step)
                return
            yield Reply(text=f"{step.step:<10} {step.text}")
            deadline = time.monotonic() + TAKEOVER_S
        shown = len(news)
        if time.monotonic() > deadline:
            raise FlowInferError("The controller died, and nothing is heard of another one.", help="flowinfer history")
        time.sleep(LOOK_S)


def _history(folder: Path) -> tuple[Step, ...]:
    """The journal, as the controller tells it; empty while there is none."""
    from flowinfer.runtime.rewire.control import ask

    if not run_dir.is_alive(folder):
        raise FlowInferError("The service ended before it had answered.", help="`flowinfer history --name NAME` knows.")
    try:
        return [*ask(folder, Request(do="history"))][-1].steps
    except FlowInferError:
        return ()


def _outcome(folder: Path, step: Step) -> Reply:
    from flowinfer.runtime.rewire.control import ask

    (status,) = ask(folder, Request(do="status"))
    if step.step == "done":
        return Reply(last=True, text=step.text, plan=status.plan, source=status.source)
    text = f"The change was {step.step}: {step.text}."
    return Reply(last=True, ok=False, text=text, help="`flowinfer history` shows how far it came; try it again.")
