"""Errors as Anthropic's clients read them: types by status, 529 where the service has no room."""

from __future__ import annotations

import msgspec

from flowinfer.errors import RequestError

OVERLOADED = 529
# A full service, and one that can't answer now. A 429 of a client's own limit stays one: waiting is up to that client.
_OVERLOAD_CODES = {"overloaded", "service_unavailable", "worker_died"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: RequestError) -> int:
    return OVERLOADED if error.code in _OVERLOAD_CODES else error.status


def error_body(error: RequestError) -> bytes:
    """{"type": "error", "error": {type, message}}."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})
