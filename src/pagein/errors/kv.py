"""KV caches in tiers."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_bytes


class KvFull(PageinError):
    """There is no room for more KV and none could be made; nothing was changed. Bytes of the tier of the device."""

    code = "kv_full"
    http_status = 503

    def __init__(self, need: int, have: int, what: str = "KV cache") -> None:
        super().__init__(
            f"{what}: {format_bytes(need)} of KV are needed, {format_bytes(have)} are free",
            hint="give the KV cache more memory, shorten the text, or close conversations that are finished",
            need_bytes=need,
            have_bytes=have,
        )


class CacheMismatch(PageinError):
    """A cache is used for what it was not made for; the message names what differs and both values."""

    code = "cache_mismatch"
    http_status = 400

    def __init__(self, what: str, want: object, got: object, hint: str | None = None) -> None:
        told = f"{what}: the cache has {want}, what came has {got}"
        super().__init__(told, hint=hint, what=what, want=str(want), got=str(got))


class KvLost(PageinError):
    """KV that came up from a lower tier did not arrive whole; the pass ended, and beginning the turn again works."""

    code = "kv_lost"
    http_status = 503


class KvBusy(PageinError):
    """A conversation is in a turn, and what was asked of it can only be done between turns."""

    code = "kv_busy"
    http_status = 409


class KvSettingsWrong(PageinError):
    """Settings of KV tiers contradict each other or are no shares; the message names the field and its value."""

    code = "kv_settings"
    http_status = 400
    exit_code = 2


class BlockDamaged(PageinError):
    """A block on disk is not what was written, cannot be read, or has left (`gone`): a miss."""

    code = "kv_block_damaged"

    def __init__(self, message: str, ref: object = None, *, gone: bool = False) -> None:
        super().__init__(message)
        self.ref, self.gone = ref, gone


class StoreInUse(PageinError):
    """Another process has the folder of KV blocks open; the message names both."""

    code = "kv_store_in_use"
    http_status = 409

    def __init__(self, folder: object, holder: int | None) -> None:
        who = "another process" if holder is None else f"process {holder}"
        super().__init__(
            f"the KV blocks in {folder} are in use by {who}",
            hint="stop the model that uses them, or give each worker a folder of its own",
            folder=str(folder),
            pid=holder,
        )
