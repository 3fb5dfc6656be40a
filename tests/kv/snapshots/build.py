"""Small fingerprints, offers and stores for the tests of `pagein.kv`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pagein.kv.snapshots.answers import Kept, Miss
from pagein.kv.snapshots.key import Fingerprint
from pagein.kv.snapshots.offer import Offer
from pagein.kv.snapshots.store import Store

FINGERPRINT = Fingerprint(
    weights="a" * 64,
    quantisation="Q8_0",
    kv_type_k="f16",
    kv_type_v="f16",
    context=4096,
    engine="llama_cpp",
    build="b11549",
    tenant="t" * 64,
    rope={"freq_base": "10000"},
    layout={"flash_attention": "on", "swa_full": "off"},
)


def fingerprint(**changes: Any) -> Fingerprint:
    """The usual fingerprint with changes."""
    return replace(FINGERPRINT, **changes)


def offer(tokens: list[int], size: int = 1000, **fields: Any) -> Offer:
    """An offer of the usual fingerprint."""
    return Offer(fields.pop("fingerprint", FINGERPRINT), tokens, size, **fields)


def payload_of(tokens: list[int], size: int = 1000) -> list[bytes]:
    """A payload that tells which tokens it belongs to, in uneven chunks."""
    line = repr(tokens[-4:]).encode() + b"|%d|" % len(tokens)
    whole = (line * (size // len(line) + 1))[:size]
    return [whole[: size // 3], whole[size // 3 :]]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001  # no two snapshots of one moment
        return self.now


def open_store(root: Path, clock: Clock | None = None, **fields: Any) -> Store:
    """A store with a cap of 1 MB and no floor, unless told otherwise."""
    return Store.open(root, **{"cap": 1_000_000, "floor": 0, "clock": clock or Clock(), **fields})


def bytes_on_disk(root: Path) -> int:
    """What all files in a folder have, hidden ones, too."""
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_symlink() or not path.is_dir())


def drafts(root: Path) -> list[Path]:
    """What was left half-written."""
    return [path for path in root.rglob("*") if path.name.endswith(".draft")]


def keep(store, tokens, size=1000, **fields):
    """Put a snapshot that must be kept."""
    kept = store.put(offer(tokens, size, **fields), payload_of(tokens, size))
    assert isinstance(kept, Kept), kept
    return kept


def damage(entry):
    """Flip the last byte of the payload."""
    data = bytearray(entry.path.read_bytes())
    data[-65] ^= 1
    entry.path.write_bytes(data)


def miss(store, tokens, kind, **fields):
    """Ask for tokens that must be a miss of this kind; returns its reason."""
    found = store.longest_match(fields.pop("fingerprint", FINGERPRINT), tokens, **fields)
    assert isinstance(found, Miss), found
    assert found.kind is kind, found
    return found.reason


def ids(store):
    return {entry.id for entry in store.entries()}
