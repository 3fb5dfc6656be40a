"""Lists of items, some at a time, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from pagein.errors import BadRequest
from pagein.history import Entry, Page, Span

_MOST = 100
_USUAL = 20
_LONGEST_ID = 200


def read_span(request: web.Request) -> Span:
    """Read ``after``, ``limit`` and ``order`` of a query; raises BadRequest."""
    limit, order, after = (request.query.get(name) for name in ("limit", "order", "after"))
    if order not in (None, "asc", "desc"):
        raise BadRequest("`order` must be asc or desc", param="order")
    if limit is not None and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST):
        raise BadRequest(f"`limit` must be a number from 1 to {_MOST}", param="limit")
    if after is not None and len(after) > _LONGEST_ID:
        raise BadRequest("`after` must be the id of an item", param="after")
    if "before" in request.query:
        raise BadRequest("`before` is not served here: list with `after` and `order`", param="before")
    return Span(after or None, int(limit) if limit is not None else _USUAL, order != "asc")


def page_json(page: Page) -> web.Response:
    """Answer with a page."""
    return web.json_response(list_of(page.entries, page.more))


def list_of(entries: tuple[Entry, ...], more: bool = False) -> dict[str, Any]:
    """Return entries as a list object."""
    data: list[Mapping[str, Any]] = [entry.body for entry in entries]
    first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
