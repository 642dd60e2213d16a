"""Lists by pages, as the query of a request asks for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qs

from flowinfer.serve.asgi import Scope
from flowinfer.serve.openai.fields import invalid

MAX_LIMIT = 10_000


def page(scope: Scope, cards: list[dict[str, Any]], *, ignored: Collection[str] = ()) -> dict[str, Any]:
    """`limit` of the cards (newest first) behind `after`; order=asc turns them round. `before` ends the page.

    Raises RequestError naming the parameter at fault; those in `ignored` ask for nothing here.
    """
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    if unknown := query.keys() - {"limit", "after", "before", "order", *ignored}:
        raise invalid(min(unknown), "is not a parameter of this list.", "unknown_parameter")
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_LIMIT):
        raise invalid("limit", f"must be from 1 to {MAX_LIMIT}.")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc.")
    ordered = cards if order == "desc" else cards[::-1]
    ids = [card["id"] for card in ordered]
    first, last = _place(ids, query, "after", -1) + 1, _place(ids, query, "before", len(ids))
    rest = ordered[first:last]
    found, more = rest[: int(limit)], len(rest) > int(limit)
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, "has_more": more, **ends}


def _place(ids: list[str], query: dict[str, str], name: str, without: int) -> int:
    if name not in query:
        return without
    if query[name] not in ids:
        raise invalid(name, "must be an id of the list.")
    return ids.index(query[name])
