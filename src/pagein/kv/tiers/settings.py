"""The thresholds of the tiers (K3), and marks with hysteresis. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pagein.errors import KvSettingsWrong

Compression = Literal["fp8", "int8", "int4"]
"""What demoted blocks may be squeezed to: all of them lose bits, so none is the default."""


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How many conversations stay where; every share is of the tier's bytes."""

    active: int = 4
    """Conversations in a turn at once: `KvPool.could` admits no more."""
    warm: int = 12
    """Idle conversations, the last used ones, that trimming ahead of need leaves where they are."""
    device_share: float = 0.90
    """Filled beyond this, the device tier demotes idle conversations ahead of need."""
    host_share: float = 0.78
    """Filled beyond this, the host tier moves its coldest blocks on to the disk."""
    slack: float = 0.10
    """Hysteresis: what began at a share ends at so much below it."""
    pinned_share: float = 0.35
    """Share of the machine's memory that the host tier may lock into place; what is beyond is pageable, and slower."""
    max_tokens: int | None = None
    """Longest conversation that is kept between turns, in tokens; None: as the budget allows."""
    write_behind: bool = True
    """Copy what a turn added to the tier below right after it, in the background, so that demotion is only a drop."""
    compression: Compression | None = None
    """Squeeze blocks on their way down. Lossy: what comes back is near what went, not equal."""
    overlap: bool = False
    """Let a turn compute while its later layers still come up from the disk. A damaged block then ends the pass with
    `KvLost`, and the caller begins the turn again; without it such a block only shortens the prefix."""
    worth: bool = True
    """Skip a promotion that measured prefill beats."""

    def __post_init__(self) -> None:
        for name in ("device_share", "host_share", "pinned_share"):
            _check(0 < getattr(self, name) <= 1, f"{name} is a share above 0, up to 1, not {getattr(self, name)}")
        _check(0 <= self.slack < min(self.device_share, self.host_share), f"slack is {self.slack}, below the shares")
        _check(self.active >= 1, f"active is at least 1, not {self.active}")
        _check(self.warm >= 0, f"warm is 0 or more, not {self.warm}")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens is at least 1, not {self.max_tokens}")
        known = get_args(Compression)
        _check(self.compression in (None, *known), f"compression is one of {', '.join(known)}, not {self.compression}")

    @property
    def lossy(self) -> bool:
        """True where what comes back from a lower tier is not bit for bit what went there."""
        return self.compression is not None


def _check(holds: bool, words: str) -> None:
    if not holds:
        raise KvSettingsWrong(f"KV settings: {words}")


@dataclass(slots=True)
class Mark:
    """A level with hysteresis: beyond ``high`` it asks for room, until ``low`` is reached."""

    high: float
    low: float
    _above: bool = False

    def excess(self, used: int, total: int) -> int:
        """Bytes that should leave now; 0 between the marks on the way up, and below the low one."""
        if used > self.high * total:
            self._above = True
        elif used <= self.low * total:
            self._above = False
        return max(used - int(self.low * total), 0) if self._above else 0
