"""Messages from plain values, as a test file gives them for a cut."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from flowinfer.errors import FlowInferError
from flowinfer.message import Message, type_registry
from flowinfer.spec.hints import did_you_mean

_ARRAYS = ("tokens", "counts")


def made_message(kind: str, name: str, fields: dict[str, Any]) -> Message:
    """A message of this type, with the case's name as its id. Raises FlowInferError that names the field at fault.

    num_tokens stands for so many tokens; maps stand for the structs inside; arrays are int32.
    """
    cls = type_registry[kind]
    usual = {"id": name, "sampling": {}}
    fields = {key: value for key, value in usual.items() if key in cls.__struct_fields__} | fields
    if "num_tokens" in fields:
        fields["tokens"] = [1] * int(fields.pop("num_tokens"))
    cls = type_registry[kind]
    given = {
        key: value for key, value in fields.items() if key in cls.__struct_fields__ or key not in ("id", "sampling")
    }
    try:
        message: Message = _made(cls, given, kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise FlowInferError(f"a {kind} can't be made of these fields: {error}.") from error
    return message


def _made(cls: Any, fields: dict[str, Any], where: str) -> Any:
    types = {field.name: field.type for field in msgspec.structs.fields(cls)}
    for key in fields:
        if key not in types:
            raise FlowInferError(f"{where} has no field {key!r}.", help=did_you_mean(key, types))
    return cls(**{key: _value(value, types[key], key, f"{where}.{key}") for key, value in fields.items()})


def _value(value: Any, kind: Any, key: str, where: str) -> Any:
    if key in _ARRAYS and isinstance(value, list):
        return np.array(value, np.int32)
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _made(kind, value, where)
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        raise FlowInferError(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}.") from error
