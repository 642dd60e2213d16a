"""What headers say of a request: class and retention of what it caches, and its session, for experiments."""

from __future__ import annotations

import re
from typing import TypeVar

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Scope, header
from flowinfer.serve.openai.fields import retention_of
from flowinfer.serve.openai.job import Job

CACHE_CLASS, CACHE_RETENTION = b"x-cache-class", b"x-cache-retention"
JobT = TypeVar("JobT", bound=Job)
_WORD = re.compile(rb"[A-Za-z0-9_-]{1,64}")
SESSION = b"x-session-id"
_SESSION = re.compile(rb"[\x21-\x7e]{1,256}")


def classed(job: JobT, scope: Scope) -> JobT:
    """The job, its calls in the cache class, with the retention, and in the session that headers name.

    What proxies know of traffic beats what bodies say.
    """
    given = header(scope, CACHE_CLASS)
    if given and not _WORD.fullmatch(given):
        raise RequestError(400, f"The header {CACHE_CLASS.decode()} takes up to 64 letters, digits, - and _.")
    session = header(scope, SESSION)
    if session and not _SESSION.fullmatch(session):
        raise RequestError(400, f"The header {SESSION.decode()} takes up to 256 characters of ASCII without spaces.")
    written = header(scope, CACHE_RETENTION).decode(errors="replace")
    keep_s = retention_of(written, param=CACHE_RETENTION.decode()) if written else None
    for call in job.calls:
        call.cache_keep_s = call.cache_keep_s if keep_s is None else keep_s
        call.session = session.decode() or call.session
        call.cache_class = given.decode() or call.cache_class
    return job
