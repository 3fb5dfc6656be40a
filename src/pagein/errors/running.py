"""Memory that is not there, and workers that fail."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_bytes, format_duration


class NeverFits(PageinError):
    """The model needs more than the budget could ever free for it; nothing was evicted (rule 4)."""

    code = "model_too_large"
    http_status = 507
    exit_code = 5

    def __init__(self, model: str, pool: str, need: int, available: int, budget: int, held_by: list[str]) -> None:
        kept = f", with {', '.join(held_by)} kept for ever" if held_by else ""
        unkeep = f"let {', '.join(held_by)} go (`pagein unpin`, or a lower `priority`), " if held_by else ""
        super().__init__(
            f"model {model!r} needs {format_bytes(need)} of {pool}, "
            f"the budget can give it at most {format_bytes(available)} of {format_bytes(budget)}{kept}",
            hint=f"{unkeep}raise the budget, lower `context`, or choose a smaller quantisation",
            model=model,
            pool=pool,
            need_bytes=need,
            available_bytes=available,
            budget_bytes=budget,
            held_by=held_by,
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


class NoRoom(PageinError):
    """A lease on memory could not be given within its wait, or never can; the message has both numbers."""

    code = "no_room"
    http_status = 503
    exit_code = 12


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


class EngineMissing(PageinError):
    """The engine of a model is not installed here."""

    code = "engine_missing"
    http_status = 503
    exit_code = 9


class WorkerHung(PageinError):
    """The worker did nothing for its time-out and was ended."""

    code = "worker_hung"
    http_status = 504


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
