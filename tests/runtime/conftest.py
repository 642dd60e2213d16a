"""Services that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from services import Service, Start

from flowinfer.graph.plan import Plan


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Service] = []

    def begin(plan: Plan, hung_s: float = 60.0, *, kept: bool = False, max_deaths: int = 5) -> Service:
        started.append(Service(plan, tmp_path, hung_s, kept=kept, max_deaths=max_deaths))
        return started[-1]

    yield begin
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
        service.wait_gone()
