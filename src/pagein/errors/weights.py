"""Weight files, and models that stream."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_bytes


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
