"""What is known of one worker whose conversations are kept."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.model import ModelEntry
from pagein.kv.snapshots.key import Fingerprint
from pagein.kv.snapshots.snapshot import create_private, draft_of, sync_folder
from pagein.kv.snapshots.worth import Pace
from pagein.protocol import StateFacts
from pagein.sessions.llama_slots import LlamaSlots
from pagein.sessions.slot_table import SlotTable

FIRST_GUESS = 32 * 1024
"""Bytes of KV per token until a save told: that of a small model; only bounds the first save."""


@dataclass(slots=True)
class Counters:
    """What a model's requests reused, since the daemon's start; tokens."""

    restored: int = 0
    computed: int = 0
    cached: int = 0
    """Reused in all: restored, or still there."""
    restores: int = 0
    saves: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    """Why nothing was restored, and how often."""


@dataclass(slots=True)
class Live:
    """One worker."""

    model: str
    slots: LlamaSlots
    facts: StateFacts
    table: SlotTable
    whole_only: bool
    """A state of this model cannot be cut back to fewer tokens."""
    pace: Pace
    """The measured speeds of its model, with these settings and this build of the engine."""
    fingerprint: Fingerprint | None = None
    """None until the weights were digested."""
    identified: asyncio.Event = field(default_factory=asyncio.Event)
    """They were digested, or could not be."""
    in_flight: set[int] = field(default_factory=set)
    """Slots of requests that were prepared and have not ended."""
    writing: Counter[int] = field(default_factory=Counter)
    """Files of each slot that are on their way into the store."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One look, save or restore at a time: what is decided must still hold when it is done."""
    over: bool = False
    """It leaves."""
    bytes_per_token: float = FIRST_GUESS
    number: int = field(default_factory=itertools.count(1).__next__)
    """Tells this worker from those before and after it."""

    def bytes_for(self, tokens: int) -> int:
        """What a save of so many tokens will take."""
        return int(tokens * self.bytes_per_token)

    def learn_size(self, tokens: int, size: int) -> None:
        """A save took so much."""
        if tokens:
            self.bytes_per_token = size / tokens


def with_slot(body: bytes, slot: int) -> bytes:
    """Add the slot to a JSON object without touching another byte of it."""
    at = body.index(b"{") + 1
    comma = b"" if body[at:].lstrip().startswith(b"}") else b","
    return body[:at] + f'"id_slot":{slot}'.encode() + comma + body[at:]


def fingerprint_of(entry: ModelEntry, facts: StateFacts, weights: str, tenant: str) -> Fingerprint:
    """Everything that a worker's snapshots depend on."""
    assert entry.info is not None
    return Fingerprint(
        weights=weights,
        quantisation=str(entry.info.metadata.get("general.file_type", "")),
        kv_type_k=facts.kv_type_k,
        kv_type_v=facts.kv_type_v,
        context=facts.context or 0,
        engine=entry.engine,
        build=facts.build,
        tenant=tenant,
        rope={},  # of the weights, whose digest is here; else by arguments and environment, whose digests are facts
        layout=dict(facts.layout),
    )


def is_tenant_of(folder: Path, tenant: str) -> bool:
    """Whether the last daemon of this folder had no other tenant; this one is noted there for the next. Raises OSError.

    Where it had another, a worker that it left alive may hold what that one said.
    """
    note = folder / "tenant"
    try:
        last = note.read_text()
    except FileNotFoundError:
        last = None
    if last != tenant:
        draft = draft_of(note)
        with create_private(draft) as file:
            file.write(tenant.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, note)
        sync_folder(folder)
    return last in (None, tenant)
