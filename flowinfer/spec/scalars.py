"""What a bare word in YAML means: number, true, false, null, text. Names those that YAML 1.1 and 1.2 read apart."""

from __future__ import annotations

import re
from typing import NamedTuple

Scalar = str | int | float | bool | None

_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_SWITCH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_SEXAGESIMAL = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|0o[0-7]+|0x[0-9a-fA-F_]+|0b[01_]+|[0-9]+(_[0-9]+)+)")
MAX_DIGITS = 300  # int() of a longer text is refused by Python, and no setting needs it


class Trap(NamedTuple):
    """A bare word that readers of YAML disagree about."""

    code: str
    message: str
    help: str


def resolve_plain(text: str) -> tuple[Scalar, Trap | None]:
    """The value of an unquoted scalar, and the trap where it is one, with the value that was probably meant."""
    if text in _WORDS:
        return _WORDS[text], None
    if text.lower() in _SWITCH:
        return _SWITCH[text.lower()] == "true", _switch(text)
    if _SEXAGESIMAL.fullmatch(text):
        return text, Trap("FI105", f"`{text}` is 60-based in YAML 1.1 and text in 1.2.", f'Write "{text}" in quotes.')
    if _ODD_NUMBER.fullmatch(text):
        meant = _odd_value(text)
        help = f'Write {meant} as a decimal number, or "{text}" in quotes.'
        return meant, Trap("FI106", f"`{text}` means different numbers to different readers.", help)
    if len(text) <= MAX_DIGITS and _INT.fullmatch(text):
        return int(text), None
    if len(text) <= MAX_DIGITS and _FLOAT.fullmatch(text):
        value = float(text)
        return (text if value in (float("inf"), float("-inf")) else value), None
    return text, None


def _switch(text: str) -> Trap:
    meant = _SWITCH[text.lower()]
    message = f"`{text}` is a boolean in YAML 1.1 and text in 1.2."
    return Trap("FI104", message, f'Write {meant}, or "{text}" in quotes.')


def _odd_value(text: str) -> int:
    digits = text.replace("_", "")[:MAX_DIGITS]
    try:
        return int(digits, 0)
    except ValueError:
        return int(digits)
