"""The few requests that the tier makes of an object store, through obstore. All errors are OSErrors; none is retried
for longer than its time.

`Client` is the seam that tests put failing stores behind. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from flowinfer.errors import FlowInferError

_INI = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}
_CLOCK = "clock"
_RETRIES = 2  # after a 5xx or a broken connection, within the request's time


class Listed(NamedTuple):
    """An object. modified: seconds since 1970, by the store's clock."""

    key: str
    size: int
    modified: float


class Client:
    """One store, under the prefix of its URL. Thread-safe; releases the GIL while it waits."""

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        credentials_file: str | None = None,
        profile: str = "default",
        timeout_s: float = 10.0,
    ) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise FlowInferError(
                "the object tier needs the package obstore.", help="pip install 'flowinfer[object]'"
            ) from error
        self.url, self._obstore = url, obstore
        how: dict[str, Any] = {}
        if url.startswith("file:"):
            how["mkdir"] = True
        elif not url.startswith("memory:"):
            limit = timedelta(seconds=timeout_s)
            how["retry_config"] = {"max_retries": _RETRIES, "retry_timeout": limit}
            # http is refused unless the file allows it: credentials and KV would travel in the open
            options = dict(options or {})
            how["client_options"] = {
                "timeout": limit,
                "connect_timeout": min(limit, timedelta(seconds=3)),
                "allow_http": str(options.pop("allow_http", False)).lower() == "true",
            }
            how["config"] = {**options, **(_credentials(Path(credentials_file), profile) if credentials_file else {})}
        try:
            self._store = from_url(url, **how)
        except (obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise FlowInferError(f"the object store {url} can't be used: {_first_line(error)}") from error

    def put(self, key: str, body: bytes | bytearray | memoryview) -> None:
        """Writes an object, whole or not at all."""
        with self._errors():
            self._obstore.put(self._store, key, body, use_multipart=False)

    def get(self, key: str) -> memoryview:
        """All bytes of an object. Raises FileNotFoundError where there is none."""
        with self._errors():
            return memoryview(self._obstore.get(self._store, key).bytes())

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; one that is gone already is no error."""
        with self._errors():
            try:
                self._obstore.delete(self._store, list(keys))
            except FileNotFoundError:
                for key in keys:  # a local store stops at the first that is missing
                    try:
                        self._obstore.delete(self._store, key)
                    except FileNotFoundError:
                        continue

    def list(self, prefix: str) -> Iterator[Listed]:
        """All objects under a prefix (whole parts of a path)."""
        with self._errors():
            for some in self._obstore.list(self._store, prefix, chunk_size=1000):
                yield from (Listed(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in some)

    def now(self) -> float:
        """The store's clock, by which objects age: our own may be wrong, and differs from that of other services."""
        with self._errors():
            self._obstore.put(self._store, _CLOCK, b"", use_multipart=False)
            return self._obstore.head(self._store, _CLOCK)["last_modified"].timestamp()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise OSError(f"{type(error).__name__}: {_first_line(error)}") from error


def _credentials(path: Path, profile: str) -> dict[str, str]:
    """What a file in the format of ~/.aws/credentials has of this profile."""
    parser = configparser.ConfigParser()
    try:
        with path.expanduser().open() as file:
            parser.read_file(file)
    except (OSError, configparser.Error) as error:
        raise FlowInferError(f"credentials can't be read from {path}: {type(error).__name__}.") from error
    if profile not in parser:
        raise FlowInferError(f"{path} has no profile {profile!r}; it has {', '.join(parser.sections()) or 'none'}.")
    return {_INI[name]: value for name, value in parser[profile].items() if name in _INI}


def _first_line(error: BaseException) -> str:
    """The message without obstore's dump of the cause, which repeats requests."""
    return (str(error).strip().splitlines() or [""])[0][:300]
