"""``pagein state verify``: snapshots one after the other, KV blocks part by part, so that a bar says how far it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from pagein.cli.address import Daemon
from pagein.cli.client import Client, call
from pagein.cli.console import errors, print_json, printable, show
from pagein.errors import SnapshotDamaged, SnapshotNotFound
from pagein.gateway.snapshot_ports import BlocksView, Verified
from pagein.units import format_bytes

SNAPSHOT = re.compile(r"[0-9a-f]{24}")


def verify(daemon: Daemon, names: list[str], json: bool) -> None:
    """Have snapshots read through, by their ids, or all and all KV blocks; raises SnapshotDamaged for any fault."""
    for name in names:
        if not SNAPSHOT.fullmatch(name):
            raise SnapshotNotFound(name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = errors()

    async def ask(client: Client) -> tuple[Verified, dict[str, Verified]]:
        wanted: list[str | None] = [*names] or [None]
        found = Verified(0, 0, [])
        for name in wanted:
            found = _both(found, await client.verify(name))
        stores = [] if names else (await client.saved()).blocks
        with Progress(*columns, console=console, transient=True, disable=json or not console.is_terminal) as progress:
            return found, {store.model: await _read_blocks(client, store, progress) for store in stores}

    snapshots, blocks = call(daemon, ask)
    if json:
        told = {model: _plain(one) for model, one in blocks.items()}
        print_json({**_plain(snapshots), "blocks": told})
    else:
        _tell("", "snapshot", snapshots)
        for model, one in blocks.items():
            _tell(f"{printable(model)}: ", "KV block", one)
    _refuse(snapshots, blocks)


async def _read_blocks(client: Client, store: BlocksView, progress: Progress) -> Verified:
    task = progress.add_task(printable(store.model), total=store.bytes)
    whole, after = Verified(0, 0, []), None
    while True:
        part = await client.verify_blocks(store.model, after)
        whole, after = _both(whole, part), part.next
        progress.update(task, completed=whole.bytes, total=whole.bytes + part.left)
        if after is None:
            return whole


def _both(one: Verified, other: Verified) -> Verified:
    return Verified(one.checked + other.checked, one.bytes + other.bytes, one.faults + other.faults)


def _plain(found: Verified) -> dict[str, object]:
    return {"checked": found.checked, "bytes": found.bytes, "faults": [asdict(fault) for fault in found.faults]}


def _tell(whose: str, what: str, found: Verified) -> None:
    for fault in found.faults:
        show(Text(printable(f"{fault.id}: {fault.reason}"), "red"))
    plural = "" if found.checked == 1 else "s"
    size, faults = format_bytes(found.bytes), len(found.faults)
    show(Text(f"{whose}read {found.checked} {what}{plural} ({size}), {faults} with a fault"))


def _refuse(snapshots: Verified, blocks: Mapping[str, Verified]) -> None:
    faults = [fault for one in blocks.values() for fault in one.faults]
    unread = sum(fault.kind == "failed" and fault.id in blocks for fault in faults)
    counts = (
        (len(snapshots.faults), f"{len(snapshots.faults)} of {snapshots.checked} snapshots"),
        (len(faults) - unread, f"{len(faults) - unread} of {sum(one.checked for one in blocks.values())} KV blocks"),
        (unread, f"the KV blocks of {unread} of {len(blocks)} models"),
    )
    if told := [words for count, words in counts if count]:
        damage = "what is damaged was moved aside, and its conversation is computed anew; check the disk"
        busy = "each says why; try again once its model serves, or is stopped"
        raise SnapshotDamaged(
            f"{' and '.join(told)} cannot be used", hint=busy if unread == len(faults + snapshots.faults) else damage
        )
