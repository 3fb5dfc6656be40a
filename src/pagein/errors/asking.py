"""Who asks wrongly, or asks for what is not there."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_bytes


class ConfigError(PageinError):
    """The configuration is wrong; the message lists every fault with its line."""

    code = "invalid_config"
    http_status = 400
    exit_code = 2


class ModelNotFound(PageinError):
    """The request names a model that the configuration does not have."""

    code = "model_not_found"
    http_status = 404
    exit_code = 4

    def __init__(self, model: str, known: list[str]) -> None:
        listing = ", ".join(sorted(known)) or "none"
        super().__init__(f"there is no model {model!r}; configured: {listing}", model=model)


class CapabilityMissing(PageinError):
    """The model exists but cannot do what the request asks for."""

    code = "capability_missing"
    http_status = 400

    def __init__(self, model: str, capability: str, has: list[str]) -> None:
        listing = ", ".join(sorted(has)) or "nothing"
        super().__init__(f"model {model!r} cannot do {capability}; it offers: {listing}", model=model)


class BadRequest(PageinError):
    """The request cannot be understood; the message names the field."""

    code = "invalid_request"
    http_status = 400


class RequestTooLarge(PageinError):
    """The request body passes the configured limit."""

    code = "request_too_large"
    http_status = 413

    def __init__(self, size: int | None, limit: int) -> None:
        got = "more" if size is None else format_bytes(size)
        super().__init__(
            f"the request body has {got}, the limit is {format_bytes(limit)}",
            hint="raise server.max_body",
            limit_bytes=limit,
        )


class ContextLengthExceeded(PageinError):
    """The prompt is longer than the model's context, or the request wishes for a longer one (row G8)."""

    code = "context_length_exceeded"
    http_status = 400

    def __init__(self, model: str, tokens: int | None, context: int | None, wish: str | None = None) -> None:
        holds = context if context is not None else "fewer"
        if wish is None:
            message = f"the prompt has {tokens if tokens is not None else 'more'} tokens, "
            hint = "shorten the prompt, or raise `context` of this model"
        else:  # the field of the request; a model is never reloaded for it
            message = f"the request wishes for a context of {tokens} tokens (`{wish}`), "
            hint = f"lower `{wish}` or leave it out, or raise `context` of this model"
        super().__init__(
            f"{message}the context of {model!r} holds {holds}",
            hint=hint,
            model=model,
            tokens=tokens,
            context=context,
            param=wish,
        )


class QueueFull(PageinError):
    """The model's bounded queue is full (row G6)."""

    code = "queue_full"
    http_status = 429

    def __init__(self, model: str, waiting: int, limit: int) -> None:
        super().__init__(
            f"the queue of model {model!r} is full: {waiting} waiting, the limit is {limit}",
            hint="try again after the Retry-After time, or raise `queue` of this model",
            model=model,
            waiting=waiting,
            limit=limit,
            retry_after=1,
        )


class InUse(PageinError):
    """An operator asked for something that a pin or a lease forbids."""

    code = "in_use"
    http_status = 409
    exit_code = 10


class NotLoaded(PageinError):
    """An operator asked for something that only a loaded model can do."""

    code = "not_loaded"
    http_status = 409
    exit_code = 10

    def __init__(self, model: str, state: str, what: str) -> None:
        super().__init__(
            f"model {model!r} is {state}: {what}", hint=f"`pagein load {model}` first", model=model, state=state
        )


class AlreadyRunning(PageinError):
    """Another daemon owns the state folder."""

    code = "already_running"
    exit_code = 11


class LeaseNotFound(PageinError):
    """There is no such lease on memory: it ended, or never was."""

    code = "lease_not_found"
    http_status = 404


class ShuttingDown(PageinError):
    """The daemon is stopping and takes no new requests."""

    code = "shutting_down"
    http_status = 503


class Unauthorized(PageinError):
    """The API key is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class Forbidden(PageinError):
    """The request comes from a web page or under a host name that may not talk to this daemon."""

    code = "forbidden"
    http_status = 403


class DaemonUnreachable(PageinError):
    """No daemon answers at the address; used by the command line."""

    code = "daemon_unreachable"
    exit_code = 8


class BadUsage(PageinError):
    """The command line cannot be understood; used by the command line."""

    code = "bad_usage"
    exit_code = 2
