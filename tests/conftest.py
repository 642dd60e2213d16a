"""What all tests share: journals and KV of services that tests start stay out of the user's home."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Iterator

import pytest


def _quiet_triton() -> None:
    """Triton's bindings list what they leaked when the process ends, which would follow pytest's summary."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_quiet_triton)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services that tests start write their journals here."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def kv_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Disk tiers whose path the file leaves open lie here, and go at the end: a killed service leaves large files."""
    folder = tmp_path_factory.mktemp("kv")
    before = os.environ.get("FLOWINFER_KV")
    os.environ["FLOWINFER_KV"] = str(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        del os.environ["FLOWINFER_KV"]
    else:
        os.environ["FLOWINFER_KV"] = before
