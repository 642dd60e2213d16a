"""Quantities as people write them: 50ms, 3d, 2k, 1GiB. Annotated types for stage settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*$")


def parse_duration(value: object) -> float:
    """Seconds of `50ms`, `1.5s`, `5min`, `3d`; 0 needs no unit. Raises ValueError naming the units."""
    return _parse(value, _SECONDS, "a duration such as 50ms, 2s, 5min, 3d", plain=lambda n: n == 0)


def parse_bytes(value: object) -> int:
    """Bytes of `1GiB`, `512MiB`, `20GB`; 0 needs no unit. Raises ValueError naming the units."""
    return round(_parse(value, _BYTES, "a size such as 512MiB or 20GB", plain=lambda n: n == 0))


def parse_tokens(value: object) -> int:
    """Tokens of `2k` (2,048), `1m` (1,048,576) or a plain number. Raises ValueError."""
    tokens = _parse(value, _TOKENS, "a number of tokens such as 4096 or 4k", plain=lambda n: True)
    if tokens != int(tokens):
        raise ValueError(f"{value!r} isn't a whole number of tokens")
    return int(tokens)


def parse_share(value: object) -> float:
    """A part of the whole: `10%` or 0.1. Raises ValueError outside of 0 to 1."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", value)):
        share = float(match[1]) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    else:
        raise ValueError(f"expected a share such as 10%, got {value!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"a share goes from 0% to 100%, not {value!r}")
    return share


def format_share(share: float) -> str:
    """0.1 -> 10%."""
    return f"{share * 100:g}%"


def _parse(value: object, units: Mapping[str, float], wanted: str, plain: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {wanted}, got {value!r}")
    if isinstance(value, (int, float)):
        if value < 0 or not plain(value):
            raise ValueError(f"expected {wanted}, got {value!r} without a unit")
        return float(value)
    match = _QUANTITY.match(value)
    if not match or (match[2] not in units and not (match[2] == "" and plain(float(match[1])))):
        raise ValueError(f"expected {wanted}, got {value!r} (units: {', '.join(u for u in units if u)})")
    return float(match[1]) * units.get(match[2], 1)


def format_duration(seconds: float) -> str:
    """The shortest exact way to write it: 0.05 -> 50ms, 259200 -> 3d."""
    for unit in ("d", "h", "min", "s", "ms", "us"):
        count = seconds / _SECONDS[unit]
        if count >= 1 and abs(count - round(count)) < 1e-9 * count:
            return f"{round(count)}{unit}"
    return "0" if seconds == 0 else f"{seconds:g}s"


def format_bytes(size: int) -> str:
    """The largest binary unit that divides it: 1073741824 -> 1GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // int(_BYTES[unit])}{unit}"
    return f"{size}B" if size else "0"


def format_tokens(tokens: int) -> str:
    """2048 -> 2k."""
    for unit in ("m", "k"):
        if tokens and tokens % _TOKENS[unit] == 0:
            return f"{tokens // _TOKENS[unit]}{unit}"
    return str(tokens)


# Settings travel to workers as JSON in the notation that people write, so a worker reads what `flowinfer show` prints.
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    Field(json_schema_extra={"unit": "duration"}),
]
ByteSize = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, when_used="json"),
    Field(json_schema_extra={"unit": "bytes"}),
]
Share = Annotated[
    float,
    BeforeValidator(parse_share),
    PlainSerializer(format_share, when_used="json"),
    Field(json_schema_extra={"unit": "share"}),
]
TokenCount = Annotated[
    int,
    BeforeValidator(parse_tokens),
    PlainSerializer(format_tokens, when_used="json"),
    Field(json_schema_extra={"unit": "tokens"}),
]
