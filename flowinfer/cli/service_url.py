"""The option --url of commands that speak to a service over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT = "http://127.0.0.1:8000"


def url_option(help: str) -> Callable[[F], F]:
    """--url; left out, the service of this user that runs on this host, or the default port when it isn't one alone."""
    about = f"{help}; the one that runs on this host, or {DEFAULT}, unless given."
    return click.option("--url", callback=lambda context, option, value: value or running_url(), help=about)


def running_url() -> str:
    """Where the only running service answers, else the default."""
    from flowinfer.runtime.rewire.control import running

    addresses = [service.address for service, _ in running() if service.address]
    return addresses[0] if len(addresses) == 1 else DEFAULT
