"""Who may talk to the daemon: the API key, or, without one, only programs of this machine (no foreign web pages)."""

from __future__ import annotations

import hmac
import re
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from pagein.config.schema import Server
from pagein.errors import Forbidden, Unauthorized

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN_PATH = "/health"
_HEADER_NAMES = re.compile(r"^[A-Za-z0-9_\-, ]{1,2000}$")
_EXPOSED = (
    "X-Request-Id, X-Pagein-Model, X-Pagein-Queue-Ms, X-Pagein-Load-Ms, X-Pagein-Evicted, X-Pagein-Conversation, "
    "X-Pagein-History, Retry-After"
)


class Door:
    """Checks every request before its handler.

    A web page that a user visits can send requests to this machine from inside the browser. Without a key these are
    told apart by two headers that pages cannot forge: ``Origin`` (the page's address) and ``Host`` (the name that it
    used, which is foreign when its DNS was pointed at 127.0.0.1).
    """

    def __init__(self, settings: Server) -> None:
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._origins = frozenset(settings.cors)

    def check(self, request: web.Request) -> None:
        """Let a request pass, or raise Unauthorized or Forbidden."""
        if request.path == _OPEN_PATH:
            return
        if self._key is not None:
            _check_key(request, self._key)
            return
        host = request.headers.get("Host")
        if host is not None and not is_loopback(host):
            raise Forbidden(
                f"requests to the host name {host[:100]!r} are not answered without an API key",
                hint="call 127.0.0.1 or localhost, or set server.api_key",
            )
        origin = request.headers.get("Origin")
        if origin is None or request.method in _SAFE_METHODS or origin in self._origins:
            return
        if not is_loopback_origin(origin):
            raise Forbidden(f"pages of {origin[:100]!r} may not send requests here", hint="add it to server.cors")

    def key_of(self, request: web.Request) -> str | None:
        """Return the key of a request that `check` let pass; None where keys are not asked for, whatever came."""
        if self._key is None:
            return None
        return request.headers.get("Authorization", "").partition(" ")[2].strip()

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a browser's question before a request across origins; None for any other request."""
        wanted = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or wanted is None:
            return None
        origin = request.headers.get("Origin", "")
        if origin not in self._origins:
            raise Forbidden(f"pages of {origin[:100]!r} may not send requests here", hint="add it to server.cors")
        headers = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": "600"}
        names = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.match(names):
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=204, headers=headers)

    def mark(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add the CORS headers to an answer, where its origin is configured."""
        if not self._origins:
            return
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _check_key(request: web.Request, key: bytes) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("an API key is needed", hint="send it as `Authorization: Bearer KEY`")
    if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key):
        raise Unauthorized("the API key is wrong", hint="it is server.api_key of the daemon's configuration")


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine by a name that DNS cannot point elsewhere."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and _is_local(name)


@lru_cache(maxsize=256)
def is_loopback_origin(origin: str) -> bool:
    """Tell whether an Origin header names a page that this machine serves itself."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.hostname is not None and _is_local(parts.hostname)
    except ValueError:
        return False


def _is_local(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
