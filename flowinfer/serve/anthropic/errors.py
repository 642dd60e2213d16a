"""Errors as Anthropic's clients read them: types by status, 529 where the service has no room."""

from __future__ import annotations

from typing import Any

import msgspec

from flowinfer.errors import RequestError

OVERLOADED = 529
NO_THREADS = "thread_unsupported_request"
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
    """{"type": "error", "error": {type, message}}, with details where the client looks for them."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    said: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        said["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": said})
