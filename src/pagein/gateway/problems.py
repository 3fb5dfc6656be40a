"""Errors as HTTP: one body shape that OpenAI clients read, with Pagein's code, numbers and hint in it."""

from __future__ import annotations

import json
import math
from typing import Any

from aiohttp import web

from pagein.errors import ContextLengthExceeded, PageinError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_LONGEST_MESSAGE = 2000


def problem(error: PageinError) -> dict[str, Any]:
    """Return the body of an error: the numbers of ``details`` stand beside the message."""
    return _body(error.http_status, error.code, error.message, {"hint": error.hint, **error.details})


def response_of(error: PageinError) -> web.Response:
    """Return the whole HTTP answer for an error."""
    headers = retry_header(error.details.get("retry_after"))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(error.http_status, problem(error), headers)


def retry_header(seconds: object) -> dict[str, str]:
    """Return the header that says when to ask again; none where that is not known."""
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf:
        return {"Retry-After": str(math.ceil(seconds))}
    return {}


def response_of_http(error: web.HTTPException, request: web.Request) -> web.Response:
    """Return the answer for a path or method that does not exist."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"there is no {request.method} {request.path[:200]}" if error.status in codes else error.reason
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return _answer(error.status, _body(error.status, codes.get(error.status, "http_error"), message, {}), headers)


def internal_problem() -> dict[str, Any]:
    """Return the body for a fault of Pagein itself; the log has the rest."""
    return _body(500, "internal_error", "Pagein failed on this request; its log says why", {})


def from_worker(model: str, status: int, body: bytes) -> bytes:
    """Return the body to pass on for a worker's error answer.

    Answers below 500 and those in OpenAI's shape pass unchanged; other failures are put into that shape. Raises
    ContextLengthExceeded for llama-server's way of saying it.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and error.get("type") == "exceed_context_size_error":
        raise ContextLengthExceeded(model, _count(error.get("n_prompt_tokens")), _count(error.get("n_ctx")))
    if status < 500 or (isinstance(error, dict) and "message" in error):
        return body
    return _encode(_body(status, "worker_error", _message(parsed, status, body), {"model": model}))


def retry_of_worker(body: bytes) -> dict[str, str]:
    """Return the header for a worker's error that says when to ask again: parts of a split model that are busy."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return retry_header(error.get("retry_after")) if isinstance(error, dict) else {}


def as_event(status: int, body: bytes) -> dict[str, Any]:
    """Return a worker's error answer as the value of an event, for a stream that has begun."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
        return parsed
    return _body(status, "worker_error", _message(parsed, status, body), {})


def _message(parsed: Any, status: int, body: bytes) -> str:
    if isinstance(parsed, dict):
        for key in ("error", "message", "detail"):
            if isinstance(parsed.get(key), str):
                return str(parsed[key])[:_LONGEST_MESSAGE]
    text = body[: 4 * _LONGEST_MESSAGE].decode("utf-8", "replace").strip()
    return text[:_LONGEST_MESSAGE] or f"the worker answered {status} without a message"


def _body(status: int, code: str, message: str, more: dict[str, object]) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {**more, "message": message, "type": kind, "code": code, "param": more.get("param")}}


def _answer(status: int, body: dict[str, Any], headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=_encode(body), headers=headers, content_type="application/json")


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
