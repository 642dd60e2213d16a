"""Runs the service of a test in a process of its own: `python -m flowinfer.testing.serve FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan
from flowinfer.runtime.supervisor import Supervisor

PLAN = "plan.json"


def say(line: str) -> None:
    """To the runner, who shows it when the service doesn't start."""
    print(line, flush=True)


def main() -> int:
    """The exit code."""
    plan = msgspec.json.decode((Path(sys.argv[1]) / PLAN).read_bytes(), type=Plan)
    try:
        Supervisor(plan, say=say, ready=lambda address: say(f"READY {address}")).run()
    except FlowInferError as error:
        say(f"ERROR {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
