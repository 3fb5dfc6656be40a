"""What is kept of conversations, as tables and lines."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from pagein.cli.console import printable
from pagein.cli.views import short_duration
from pagein.gateway.snapshot_ports import BlocksView, ReuseView, SnapshotView, UsageView
from pagein.history import Thread
from pagein.units import format_bytes, format_duration

_FINGERPRINT = 8
"""Digits of it in a table."""


def thread_table(threads: Iterable[Thread]) -> Table:
    """List conversations."""
    table = _table()
    table.add_column("NAME", overflow="fold")
    for title in ("KIND", "MODEL"):
        table.add_column(title, no_wrap=True)
    for title in ("ITEMS", "SIZE", "USED"):
        table.add_column(title, justify="right", no_wrap=True)
    now = time.time()
    for one in threads:
        used = f"{short_duration(max(now - one.used, 0))} ago"
        name = Text(printable(one.name or one.id), "cyan")
        table.add_row(name, str(one.kind), one.model or "-", str(one.entries), format_bytes(one.bytes), used)
    return table


def snapshot_table(snapshots: Iterable[SnapshotView]) -> Table:
    """List snapshots; WORTH is the time that a restore saves, as it was measured when it was saved."""
    table = _table()
    table.add_column("SNAPSHOT", no_wrap=True)
    table.add_column("MODEL", overflow="fold")
    for title in ("TOKENS", "SIZE", "IDLE", "WORTH"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in snapshots:
        model = Text(printable(one.model or one.fingerprint[:_FINGERPRINT]))
        idle, worth = short_duration(one.idle_seconds), format_duration(one.worth_seconds)
        table.add_row(Text(one.id, "cyan"), model, str(one.tokens), format_bytes(one.bytes), idle, worth)
    return table


def usage_line(usage: UsageView) -> Text:
    """Say what the snapshots take, and may take."""
    plural = "" if usage.snapshots == 1 else "s"
    line = f"{usage.snapshots} snapshot{plural}, {format_bytes(usage.bytes)} of {format_bytes(usage.cap)}"
    if usage.damaged_bytes:
        line += f"; {format_bytes(usage.damaged_bytes)} of it damaged and moved aside"
    return Text(line)


def blocks_line(store: BlocksView) -> Text:
    """Say what a worker that keeps KV caches by itself has on the disk."""
    size = f": KV blocks, {format_bytes(store.bytes)} of {format_bytes(store.cap)}"
    return Text.assemble((printable(store.model), "bold"), size)


def reuse_line(one: ReuseView) -> Text:
    """Say what one model's requests reused since the daemon's start."""
    tokens = f"{one.restored} tokens restored, {one.cached} still there, {one.computed} computed"
    misses = ", ".join(f"{kind} {count}" for kind, count in sorted(one.misses.items()))
    counts = f"{one.restores} restores, {one.saves} saves, misses: {misses or 'none'}"
    return Text.assemble((printable(one.model), "bold"), f": {tokens}; {counts}")


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
