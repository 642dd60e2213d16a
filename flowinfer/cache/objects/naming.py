"""Names of objects: v1/NAMESPACE/BLOCK.CLASS.KEEP.TENANT, so that a listing alone tells what may be deleted. Pure."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from flowinfer.cache.keys import NAME_BYTES

ROOT = "v1"
_PLAIN = re.compile(r"[A-Za-z0-9-]")
_NAMED = re.compile(
    rf"{ROOT}/([A-Za-z0-9_-]+)/([0-9a-f]{{{2 * NAME_BYTES}}})\.([A-Za-z0-9_-]*)\.(\d+)\.([A-Za-z0-9_-]*)"
)


class Named(NamedTuple):
    """What an object's name says. keep: seconds that it stays after a use."""

    namespace: str
    name: bytes
    cls: str
    keep: int
    tenant: str

    @property
    def key(self) -> str:
        """The object's name."""
        words = f"{self.name.hex()}.{_escaped(self.cls)}.{self.keep}.{_escaped(self.tenant)}"
        return f"{ROOT}/{_escaped(self.namespace)}/{words}"


def whole_seconds(keep_s: float) -> int:
    """As a name holds them: no less."""
    return math.ceil(keep_s)


def parse(key: str) -> Named | None:
    """What a name says; None where it isn't one of ours."""
    found = _NAMED.fullmatch(key)
    if found is None:
        return None
    namespace, name, cls, keep, tenant = found.groups()
    try:
        return Named(_plain(namespace), bytes.fromhex(name), _plain(cls), int(keep), _plain(tenant))
    except ValueError:
        return None


def _escaped(word: str) -> str:
    """Any other character as _hh, a byte of UTF-8 each: stores differ in what they take."""
    return "".join(
        c if _PLAIN.fullmatch(c) else "".join(f"_{byte:02x}" for byte in c.encode(errors="surrogatepass")) for c in word
    )


def _plain(word: str) -> str:
    data = re.sub(rb"_([0-9a-f]{2})", lambda m: bytes.fromhex(m[1].decode()), word.encode())
    return data.decode(errors="surrogatepass")
