"""A message in a few lines of JSON: tensors by shape, dtype and range, long text and lists cut, all within a size."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from flowinfer.message import Message

MAX_TEXT = 200  # characters of one text
MAX_ITEMS = 8  # of one list or map
MAX_DEPTH = 6
MAX_VALUES = 1_000_000  # of a tensor whose range is looked at: 0.4 ms; larger ones are told by shape alone


def summarize(message: Message) -> dict[str, Any]:
    """Type and fields. Fields that hold their default are left out."""
    return {"type": type(message).__name__, **_fields(message, MAX_DEPTH)}


def _fields(value: msgspec.Struct, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names, defaults = value.__struct_fields__, value.__struct_defaults__
    first = len(names) - len(defaults)
    for index, name in enumerate(names):
        field = getattr(value, name)
        default = defaults[index - first] if index >= first else msgspec.NODEFAULT
        if not _is_default(field, default):
            found[name] = _short(field, depth - 1)
    return found


def _is_default(field: Any, default: Any) -> bool:
    if field is default:
        return True
    if isinstance(field, (str, int, float, bool, tuple)) and type(field) is type(default):
        return bool(field == default)
    return isinstance(field, (list, dict)) and not field


def _short(value: Any, depth: int) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value)} characters)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return tensor(value)
    if depth <= 0:
        return "…"
    if isinstance(value, msgspec.Struct):
        return _fields(value, depth)
    if isinstance(value, dict):
        shown = {str(key): _short(item, depth - 1) for key, item in list(value.items())[:MAX_ITEMS]}
        return shown if len(value) <= MAX_ITEMS else {**shown, "…": f"{len(value)} in all"}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_short(item, depth - 1) for item in list(value)[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else [*items, f"… {len(value)} in all"]
    return str(type(value).__name__)


def tensor(value: Any) -> dict[str, Any]:
    """Shape, dtype, and min, max, mean of an array or a tensor of the host.

    One on a GPU is told by its shape: reading it would make the loop wait for the device.
    """
    found: dict[str, Any] = {"shape": [int(n) for n in value.shape], "dtype": str(value.dtype).removeprefix("torch.")}
    device = str(getattr(value, "device", "cpu"))
    if device != "cpu":
        return {**found, "device": device}
    size = int(np.prod(found["shape"], dtype=np.int64))
    if not 0 < size <= MAX_VALUES:
        return found
    if not isinstance(value, np.ndarray):
        value = value.detach()
        return {**found, **{name: _number(getattr(value.float(), name)()) for name in ("min", "max", "mean")}}
    if value.dtype.kind not in "iufb":
        return found
    return {**found, "min": _number(value.min()), "max": _number(value.max()), "mean": _number(value.mean())}


def _number(value: Any) -> Any:
    number = value.item()
    if isinstance(number, float):
        return round(number, 6) if math.isfinite(number) else str(number)
    return number
