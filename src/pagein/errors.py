"""Every error that Pagein raises, each with its exit code, HTTP status, machine-readable code and hint."""

from __future__ import annotations

from typing import ClassVar, Self

from pagein.units import format_bytes, format_duration


class PageinError(Exception):
    """An error meant for people: what happened, why, and (in ``hint``) what to do.

    ``details`` holds the numbers behind the message as JSON-ready values; the HTTP error body repeats them.
    """

    code: ClassVar[str] = "pagein_error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    hint: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details
        if hint is not None:
            self.hint = hint

    def retold(self, message: str) -> Self:
        """Return the same error in other words."""
        other = self.__class__.__new__(self.__class__)
        Exception.__init__(other, message)
        other.__dict__.update(self.__dict__, message=message)
        return other

    def with_output(self, lines: list[str]) -> Self:
        """Return the same error with the last lines that its worker printed."""
        if not lines or self.details.get("log"):
            return self
        other = self.retold(add_output(self.message, lines))
        other.details = {**self.details, "log": lines}
        return other


def add_output(message: str, lines: list[str]) -> str:
    """Add the last lines of a worker's output to a message."""
    return message if not lines else message + "\nlast output:\n" + "\n".join(f"  {line}" for line in lines)


class ConfigError(PageinError):
    """The configuration is wrong; the message lists every fault with its line."""

    code = "invalid_config"
    http_status = 400
    exit_code = 2


class BadModelFile(PageinError):
    """A weight file is damaged, hostile or of an unknown format; the message names file, part and both numbers."""

    code = "bad_model_file"
    exit_code = 3


class ModelUnsuited(PageinError):
    """A model is of a kind that cannot be done as asked; the message names the kind and what stands against it."""

    code = "model_unsuited"
    http_status = 422
    exit_code = 3


class WeightsUnreadable(PageinError):
    """Bytes of a weight file did not come from the disk; the message names file, byte, and both counts of bytes."""

    code = "weights_unreadable"
    exit_code = 3

    def __init__(
        self, file: object, why: str, offset: int | None = None, wanted: int | None = None, got: int = 0
    ) -> None:
        place = "" if offset is None else f"wanted {wanted} bytes from byte {offset} on, got {got}: "
        super().__init__(f"{file}: {place}{why}", file=str(file), offset=offset, wanted_bytes=wanted, got_bytes=got)


class ReadingStopped(PageinError):
    """A reading of weights was given up before all of its bytes came."""

    code = "reading_stopped"


class WeightsAway(PageinError):
    """A model was asked to compute while its weights are not there, or where they cannot come; nothing was computed."""

    code = "weights_away"
    http_status = 503


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


class ContextTooLong(PageinError):
    """A call of the library needs more tokens of KV cache than its plan keeps memory for."""

    code = "context_too_long"
    http_status = 400

    def __init__(self, tokens: int, planned: int) -> None:
        super().__init__(
            f"the call needs a KV cache of {tokens} tokens, memory is kept for {planned}",
            hint="shorten the prompt or max_new_tokens, or load the model with a larger `context` (or `batch`)",
            tokens=tokens,
            planned=planned,
        )


class NeverFits(PageinError):
    """The model needs more than the budget could ever free for it; nothing was evicted (rule 4)."""

    code = "model_too_large"
    http_status = 507
    exit_code = 5

    def __init__(self, model: str, pool: str, need: int, available: int, budget: int, held_by: list[str]) -> None:
        kept = f", with {', '.join(held_by)} kept for ever" if held_by else ""
        super().__init__(
            f"model {model!r} needs {format_bytes(need)} of {pool}, "
            f"the budget can give it at most {format_bytes(available)} of {format_bytes(budget)}{kept}",
            hint="raise the budget, lower `context`, or choose a smaller quantisation",
            model=model,
            pool=pool,
            need_bytes=need,
            available_bytes=available,
            budget_bytes=budget,
            held_by=held_by,
        )


class DoesNotFit(PageinError):
    """Even the least plan of streamed weights passes the memory given; the message has its parts and both numbers."""

    code = "plan_too_large"
    http_status = 507
    exit_code = 5

    def __init__(self, need: int, memory: int, parts: dict[str, int], hint: str) -> None:
        words = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        super().__init__(
            f"streaming the weights needs at least {format_bytes(need)}, the memory given is {format_bytes(memory)}; "
            f"the least is {words}",
            hint=hint,
            need_bytes=need,
            memory_bytes=memory,
            parts=parts,
        )


class WaitTooLong(PageinError):
    """The bound on a wait passed; the message carries the reason that the request waited for (rule 6)."""

    code = "wait_timeout"
    http_status = 503
    exit_code = 6

    def __init__(
        self,
        model: str,
        waited: float,
        reason: str,
        *,
        position: int | None = None,
        retry_after: float = 5,
        hint: str = "try again later, or raise scheduler.max_wait",
    ) -> None:
        super().__init__(
            f"model {model!r} was not available within {format_duration(waited)}: {reason}",
            hint=hint,
            model=model,
            waited_seconds=round(waited, 3),
            reason=reason,
            position=position,
            retry_after=retry_after,
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


class LoadFailed(PageinError):
    """The worker died or gave up before it was ready; the message ends with its last log lines."""

    code = "load_failed"
    http_status = 503
    exit_code = 7


class Outgrown(LoadFailed):
    """The worker took more than it was granted, and was ended for it: by its cgroup, or by the watchdog."""

    code = "out_of_memory"

    def __init__(self, model: str, pool: str, allowance: int, limit: int, peak: int | None, by: str) -> None:
        reached = f"reached {format_bytes(peak)}" if peak is not None else "passed its limit"
        super().__init__(
            f"model {model!r} ran out of its memory: it {reached} of {pool}, it was granted {format_bytes(allowance)} "
            f"(limit {format_bytes(limit)}), and was ended by {by}",
            hint="its next load reserves more; `memory` of this model sets what the first one does",
            model=model,
            pool=pool,
            allowance_bytes=allowance,
            limit_bytes=limit,
            peak_bytes=peak,
        )


class WorkerHung(PageinError):
    """The worker did nothing for its time-out and was ended."""

    code = "worker_hung"
    http_status = 504


class InUse(PageinError):
    """An operator asked for something that a pin or a lease forbids."""

    code = "in_use"
    http_status = 409
    exit_code = 10


class AlreadyRunning(PageinError):
    """Another daemon owns the state folder."""

    code = "already_running"
    exit_code = 11


class WorkerDied(PageinError):
    """The worker ended while it served the request."""

    code = "worker_died"
    http_status = 502


class WorkerTimeout(PageinError):
    """The worker sent no byte for the model's time-out."""

    code = "worker_timeout"
    http_status = 504

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(
            f"model {model!r} sent nothing for {format_duration(seconds)}",
            hint="raise `timeout` of this model",
            model=model,
            timeout_seconds=seconds,
        )


class BadAnswer(PageinError):
    """The worker answered something that its path does not allow."""

    code = "bad_worker_answer"
    http_status = 502


class InferenceFailed(PageinError):
    """The engine failed on a request that was read without a fault; the log has the rest."""

    code = "inference_failed"
    http_status = 500

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model!r} failed on this request: {reason}", model=model)


class NoRoom(PageinError):
    """A lease on memory could not be given within its wait, or never can; the message has both numbers."""

    code = "no_room"
    http_status = 503
    exit_code = 12


class DiskFull(PageinError):
    """What is to be written does not fit on its disk; nothing was written yet, and the message has both numbers."""

    code = "disk_full"
    http_status = 507
    exit_code = 15

    def __init__(self, folder: object, need: int, free: int) -> None:
        super().__init__(
            f"{folder}: {format_bytes(need)} are to be written ({need} bytes), its disk has {format_bytes(free)} free",
            hint="name a folder on another disk",
            folder=str(folder),
            need_bytes=need,
            free_bytes=free,
        )


class LeaseNotFound(PageinError):
    """There is no such lease on memory: it ended, or never was."""

    code = "lease_not_found"
    http_status = 404


class ConversationNotFound(PageinError):
    """There is no such conversation or session: it was deleted, outlived `state.retain`, or never was."""

    code = "conversation_not_found"
    http_status = 404
    exit_code = 4


class ResponseNotFound(PageinError):
    """There is no such stored response, or what it continues was deleted."""

    code = "response_not_found"
    http_status = 404


class ItemNotFound(PageinError):
    """There is no such item in the conversation."""

    code = "item_not_found"
    http_status = 404


class SnapshotNotFound(PageinError):
    """There is no such snapshot: it was removed, left for others, or never was."""

    code = "snapshot_not_found"
    http_status = 404
    exit_code = 4

    def __init__(self, snapshot: str) -> None:
        super().__init__(f"there is no snapshot {snapshot!r}", hint="see 'pagein state ls'")


class HistoryTooLong(PageinError):
    """What was said before is longer than a request may be."""

    code = "history_too_long"
    http_status = 413

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"the history of {what} has {format_bytes(size)}, a request may have {format_bytes(limit)}",
            hint="begin a new conversation, or raise server.max_body",
            bytes=size,
            limit_bytes=limit,
        )


class HistoryFull(PageinError):
    """A turn does not fit into what conversations may take on the disk, or the disk is full."""

    code = "history_full"
    http_status = 507


class SessionBusy(PageinError):
    """Turns of one conversation wait for each other, and too many or too long."""

    code = "session_busy"
    http_status = 429


class StateOff(PageinError):
    """The request needs a stored conversation, and `state` is switched off."""

    code = "state_off"
    http_status = 400

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs stored conversations, which are switched off here",
            hint="set state.enabled: true, or send the whole history with the request",
        )


class StateBroken(PageinError):
    """The file of conversations cannot be opened, read or written."""

    code = "state_broken"
    http_status = 500
    exit_code = 13


class SnapshotDamaged(PageinError):
    """A snapshot on disk is not what was written; the message names the part and both numbers. It counts as a miss."""

    code = "snapshot_damaged"
    exit_code = 14


class SlotFault(PageinError):
    """An engine could not save, restore or look at a conversation. The request goes on without: it counts as a miss."""

    code = "slot_fault"
    http_status = 502


class SlotRefused(SlotFault):
    """The engine said no, or answered something that cannot be used."""

    code = "slot_refused"


class SlotBusy(SlotFault):
    """The engine did not come to it in time: the slot still generates."""

    code = "slot_busy"
    http_status = 504


class SlotLost(SlotFault):
    """The engine ended, or does not listen, in the middle of it."""

    code = "slot_lost"


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


class EngineMissing(PageinError):
    """The engine of a model is not installed here."""

    code = "engine_missing"
    http_status = 503
    exit_code = 9


class BadUsage(PageinError):
    """The command line cannot be understood; used by the command line."""

    code = "bad_usage"
    exit_code = 2
