"""Where there is no card, Triton's kernels run in its interpreter: this must be said before the first is decorated."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

DEVICE = os.environ.get("FLOWINFER_TEST_DEVICE", "cpu")  # cuda:0 compiles and runs them on a GPU
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def right_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16 and multiplies it as such: give its product float32."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def as_float32(x: Any) -> object:
        if x.dtype.scalar.name != "bf16":
            return x
        data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def widened(self: object, a: object, b: object, *rest: object) -> object:
        return product(self, *(as_float32(x) for x in (a, b)), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of a fraction that rounds up to one: let torch make FP8 of float32."""
    if importlib.util.find_spec("triton") is None:
        return
    import torch
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target is not interpreter.tl.float8e4nv or source is not interpreter.tl.float32:
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
