"""Runs a supervisor on a plan in JSON: `python serve_plan.py PLAN HUNG_S [MAX_DEATHS]`. Says on stdout what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.runtime.keeper import keep
from flowinfer.runtime.kept import Kept


def say(line: str) -> None:
    print(line, flush=True)


def serve(keeper: Kept | None) -> int:
    from flowinfer.graph.plan import Plan
    from flowinfer.runtime import supervisor as module
    from flowinfer.runtime.state import left_to
    from flowinfer.runtime.supervisor import Supervisor

    module.STOP_S = float(os.environ.get("STOP_S", module.STOP_S))
    left = left_to(keeper)
    plan = left.plan if left else msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)

    def ready(address: str) -> None:
        say(f"READY {address}" if left is None else f"RESUMED {os.getpid()}")

    try:
        Supervisor(plan, say=say, ready=ready, hung_s=float(sys.argv[2]), keeper=keeper, left=left).run()
    except FlowInferError as error:
        say(f"ERROR {error}")
        return 1
    say("STOPPED")
    return 0


if __name__ == "__main__":
    sys.exit(keep(serve, max_deaths=int(sys.argv[3])) if sys.argv[3:] else serve(None))
