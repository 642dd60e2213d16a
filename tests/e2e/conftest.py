"""Real processes over a real model: the services that these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Service, service

from flowinfer.engine import hub
from flowinfer.errors import FlowInferError

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's folder; pulled on first use, which takes a network."""
    try:
        return hub.resolve(MODEL, pull=True)
    except FlowInferError as error:
        pytest.skip(f"{MODEL} can't be had here: {error}")


@pytest.fixture(scope="session")
def prod() -> Iterator[Service]:
    """The disaggregated pipeline over flowinfer-mini: front, prefill and decode in processes of their own.

    float32: in bfloat16 the cut of a chunk may turn a near tie.
    """
    settings = ("workers.prefill.threads=1", "workers.decode.threads=1", "stages.prefill.with.dtype=float32")
    with service("prod.yaml", *settings) as running:
        yield running


@pytest.fixture(scope="session")
def frames() -> Iterator[Service]:
    """The same over workers that share no memory, as on two machines."""
    with service("prod.yaml", "stages.prefill.with.dtype=float32", "stages.transfer.with.transport=tcp") as running:
        yield running
