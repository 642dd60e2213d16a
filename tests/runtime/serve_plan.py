"""Runs a supervisor on a plan in JSON: `python serve_plan.py PLAN HUNG_S`. Says on stdout what the supervisor says."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan
from flowinfer.runtime.supervisor import Supervisor


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    hung_s = float(sys.argv[2])
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    try:
        Supervisor(plan, say=say, ready=lambda address: say(f"READY {address}"), hung_s=hung_s).run()
    except FlowInferError as error:
        say(f"ERROR {error}")
        sys.exit(1)
    say("STOPPED")


if __name__ == "__main__":
    main()
