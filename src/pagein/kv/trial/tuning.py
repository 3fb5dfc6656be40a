"""From what was measured on a machine to the settings of the tiers there, and when each tier pays. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

RESERVE = 1.3
"""Times the expected size that a growing conversation is given, so that it need not move (row K2)."""
MOST_ACTIVE = 4
MOST_WARM = 256
PINNED_SHARE = 0.35
"""Of the machine's memory at most: what is locked is lost to everything else."""
HOST_SHARE = 0.78
BLOCK = 64
_LOWEST_SHARE, _HIGHEST_SHARE = 0.5, 0.95
_DISK_SHARE = 0.5
"""Of a disk's free bytes that KV may take at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a machine and a model gave. Bytes and seconds; unknown is None."""

    bytes_per_token: int
    window_bytes: int
    """What sliding windows take of a conversation, however long."""
    context: int
    """Tokens that the model was made for."""
    prefill: Sequence[tuple[int, float]]
    """(tokens, seconds) of computing a prompt anew."""
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second at which each tier gives KV back, fastest tier first."""
    memory: int = 0
    """For KV on the device that computes."""
    host: int | None = None
    """Host memory that could be lent; None without an accelerator."""
    host_total: int | None = None
    disk_free: int | None = None

    def kv_bytes(self, tokens: float) -> int:
        """Bytes of a conversation."""
        return int(tokens * self.bytes_per_token) + self.window_bytes


@dataclass(frozen=True, slots=True)
class Tuned:
    """Settings for this machine, by the names of `pagein.kv.tiers.settings.KvSettings`, each with its reason."""

    max_tokens: int
    active: int
    warm: int
    device_share: float
    host_share: float
    pinned_share: float | None
    """None without an accelerator: nothing is pinned."""
    disk_cap: int | None
    reasons: Mapping[str, str]


def prefill_model(points: Sequence[tuple[int, float]]) -> Callable[[float], float]:
    """Return seconds(tokens) = a·n + b·n², fitted by least squares of the relative error, neither below 0.

    The second term is attention over what came before (2·layers·heads·dim·n² operations); the first is all else.
    """
    if not points or any(tokens <= 0 or seconds <= 0 for tokens, seconds in points):
        raise ValueError(f"prefill needs points above 0, not {list(points)}")
    # Each row is divided by its seconds: a·(n/t) + b·(n²/t) = 1.
    rows = [(n / t, n * n / t) for n, t in points]
    xx, xy, yy = (
        sum(p * q for p, q in pairs) for pairs in (_pairs(rows, 0, 0), _pairs(rows, 0, 1), _pairs(rows, 1, 1))
    )
    x, y = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = xx * yy - xy * xy
    a, b = (
        ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant) if determinant > 1e-9 * xx * yy else (0, -1)
    )
    if b < 0 or a < 0:
        a, b = x / xx, 0.0
    return lambda tokens: a * tokens + b * tokens * tokens


def restore_seconds(measured: Measured, tier: str, tokens: float) -> float:
    """Return what bringing a conversation back from a tier takes."""
    return measured.kv_bytes(tokens) / measured.tiers[tier]


def pays_from(measured: Measured, tier: str) -> int | None:
    """Return the tokens from which a tier is faster than computing anew, in whole blocks; None where it never is."""
    compute = prefill_model(measured.prefill)
    for tokens in range(BLOCK, max(measured.context, BLOCK) + 1, BLOCK):
        if restore_seconds(measured, tier, tokens) < compute(tokens):
            return tokens
    return None


def curve(measured: Measured, longest: int, points: int = 40) -> dict[str, list[tuple[int, float]]]:
    """Return (tokens, seconds until the next turn can go on) by way: computed anew, and from each tier."""
    compute = prefill_model(measured.prefill)
    last = max(longest, 2 * BLOCK)
    steps = sorted({round(BLOCK * (last / BLOCK) ** (step / (points - 1))) for step in range(points)})
    found = {"computed anew": [(n, compute(n)) for n in steps]}
    for tier in measured.tiers:
        found[f"from {tier}"] = [(n, restore_seconds(measured, tier, n)) for n in steps]
    return found


def tune(measured: Measured, length: int, wanted: int = MOST_ACTIVE) -> Tuned:
    """Return settings for conversations of a usual length, in tokens, of which so many should run at once."""
    usual = max(BLOCK, min(length, measured.context))
    alone = max(BLOCK, _tokens_in(measured, measured.memory / RESERVE))
    max_tokens = min(measured.context, alone)
    one = measured.kv_bytes(usual)
    active = max(1, min(wanted, int(measured.memory / (RESERVE * one))))
    backing = measured.memory + (measured.host or 0)
    warm = max(0, min(MOST_WARM, int(backing / one) - active))
    pinned = None if measured.host is None else _pinned_share(measured)
    device_share = _share(1 - RESERVE * one / measured.memory) if measured.memory else _LOWEST_SHARE
    host_share = HOST_SHARE if not measured.host else _share(1 - 2 * one / measured.host)
    cap = None if measured.disk_free is None else int(measured.disk_free * _DISK_SHARE)
    reasons = {
        "max_tokens": f"one conversation alone, with {RESERVE:g} × its size in reserve; the model's own limit is "
        f"{measured.context}",
        "active": f"each of {usual} tokens with its reserve" + ("" if active == wanted else f", {wanted} do not fit"),
        "warm": f"as many of {usual} tokens as the rest holds",
        "device_share": "room for one that comes back, before anybody has to wait for it",
        "host_share": "room for one that arrives while another is written to the disk"
        if measured.host
        else "no host tier here: as it comes",
    }
    if pinned is not None:
        reasons["pinned_share"] = f"at most {PINNED_SHARE:g} of the machine's memory, and half of what is free"
    return Tuned(max_tokens, active, warm, device_share, host_share, pinned, cap, reasons)


def _tokens_in(measured: Measured, nbytes: float) -> int:
    """Tokens of one conversation that so many bytes hold, in whole blocks."""
    if not measured.bytes_per_token:
        return measured.context  # all layers have a window: length costs nothing
    return int((nbytes - measured.window_bytes) / measured.bytes_per_token) // BLOCK * BLOCK


def _pinned_share(measured: Measured) -> float:
    if not measured.host or not measured.host_total:
        return PINNED_SHARE
    return max(0.01, math.floor(100 * min(PINNED_SHARE, measured.host / 2 / measured.host_total)) / 100)


def _share(value: float) -> float:
    return round(min(max(value, _LOWEST_SHARE), _HIGHEST_SHARE), 2)


def _pairs(rows: Sequence[tuple[float, float]], one: int, other: int) -> list[tuple[float, float]]:
    return [(row[one], row[other]) for row in rows]
