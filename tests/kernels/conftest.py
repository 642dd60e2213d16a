"""Where there is no card, Triton's kernels run in its interpreter: this must be said before the first is decorated."""

from __future__ import annotations

import os

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")  # cuda:0 compiles and runs them on a GPU
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
