"""What tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.engine import hub
from flowinfer.errors import ModelError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in the user's cache; tests that need it are skipped where it was never pulled."""
    try:
        return hub.resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
