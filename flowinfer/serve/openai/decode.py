"""Reads a JSON body into a checked struct; what is wrong with it is said with the field's name."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from flowinfer.errors import RequestError

Request = TypeVar("Request", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `(?P<field>[^`]*)`")


def decode(kind: type[Request], body: bytes) -> Request:
    """The body as `kind`. Raises RequestError 400 naming the field, or saying that it isn't JSON."""
    try:
        return cast(Request, _decoder(kind).decode(body))
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"The body isn't valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise RequestError(400, "The body is nested too deeply.", code="invalid_json") from None


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _field_error(text: str) -> RequestError:
    path = match["path"] if (match := _PATH.search(text)) else ""
    message = _PATH.sub("", text)
    if field := _FIELD.search(message):
        path = f"{path}.{field['field']}".strip(".")
        message = f"Unknown field '{path}'." if "unknown" in message else f"Missing required field '{path}'."
        code = "unknown_parameter" if "Unknown" in message else "missing_required_parameter"
        return RequestError(400, message, code=code, param=path)
    return RequestError(400, f"{path or 'body'}: {message}.", code="invalid_type", param=path or None)
