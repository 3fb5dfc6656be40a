"""What a pool says of itself: what lies where, what was reused, how fast copies were, and whether a block is leaked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pagein.kv.disk.answers import Usage
from pagein.kv.tiers.answers import Place
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, cache_of
from pagein.kv.tiers.conversation import Conversation
from pagein.units import format_bytes


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier; bytes are those of blocks, not of what pads them."""

    name: str
    used: int
    budget: int | None
    peak: int | None
    """None where it is not counted."""
    blocks: int
    conversations: int
    """Idle ones that rest here as a whole; on the device those in a turn as well."""
    pinned_bytes: int | None = None
    """Of host memory: page-locked."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """All of it at one moment."""

    device: TierReport
    host: TierReport | None
    disk: TierReport | None
    places: Mapping[Place, int]
    """Conversations by where they are."""
    turns: int
    prompt_tokens: int
    reused_tokens: Mapping[str, int]
    """By source; what is left of the prompts was computed."""
    hits: Mapping[str, int]
    """Turns by source."""
    demoted: int
    dropped_blocks: int
    damaged_blocks: int
    skipped_promotions: int
    parked: int
    stretched: int
    """Turns that became larger than the device."""
    stretched_now: int
    """Conversations that are, at the moment: their layers come up one by one."""
    moved_per_token: int
    """Bytes that one further token of each of these moves between the device and the tier below, all together."""
    refused: int
    """Times that a turn got `KvFull` for want of a promise."""
    bandwidth: Mapping[str, float | None]
    """Bytes per second: down, up (device and host memory), written, read (disk), layers (of conversations larger than
    the device, both ways); None before the first copy."""
    moved: Mapping[str, int]
    """Bytes that went the same ways."""
    writing: int
    """Moves that have not ended: write-behind and promotions."""
    lossy: str | None
    """How blocks are squeezed on their way down; None: never."""
    leaks: tuple[str, ...]
    """Blocks whose count of holders is not what caches and copies hold. Between two passes it must be empty."""

    def lines(self) -> list[str]:
        """The report for people."""
        tiers = [one for one in (self.device, self.host, self.disk) if one is not None]
        words = [
            f"{one.name}: {format_bytes(one.used)} of {format_bytes(one.budget)} in {one.blocks} blocks, "
            f"{one.conversations} conversations"
            for one in tiers
        ]
        reused = sum(self.reused_tokens.values())
        words.append(f"{self.turns} turns, {reused} of {self.prompt_tokens} prompt tokens reused")
        if self.stretched_now:
            words.append(
                f"conversations larger than the device: {self.stretched_now}; each further token moves "
                f"{format_bytes(self.moved_per_token)}"
            )
        if self.lossy is not None:
            words.append(f"blocks below the device are squeezed to {self.lossy}: what comes back is not exact")
        return [*words, *(f"leaked: {one}" for one in self.leaks)]


def make_report(books: Books, below: Below, writing: int) -> KvReport:
    """Take stock."""
    disk = None if below.cold is None else below.cold.store.usage()
    with books.lock:
        return _counted(books, below, writing, disk)


def _counted(books: Books, below: Below, writing: int, disk: Usage | None) -> KvReport:
    counters = books.counters
    places = Counter(place_of(one, books, below) for one in books.conversations.values())
    ways = {"down": counters.down, "up": counters.up, "written": counters.written, "read": counters.read}
    ways["layers"] = counters.gathered
    batches = [cache.batch for one in books.conversations.values() if (cache := cache_of(one)) is not None]
    stretches = [(batch.stretch, batch.length) for batch in batches if batch.stretch is not None]
    return KvReport(
        device=_device(books, places),
        host=_host(below, places),
        disk=_disk(disk, places),
        places=dict(places),
        turns=counters.turns,
        prompt_tokens=counters.prompt_tokens,
        reused_tokens={source.value: count for source, count in counters.reused.items() if count},
        hits={source.value: count for source, count in counters.hits.items() if count},
        demoted=counters.demoted,
        dropped_blocks=counters.dropped,
        damaged_blocks=counters.damaged,
        skipped_promotions=counters.skipped,
        parked=counters.parked,
        stretched=counters.stretched,
        stretched_now=len(stretches),
        moved_per_token=sum(stretch.moved_for(length) for stretch, length in stretches),
        refused=counters.full,
        bandwidth={name: way.bandwidth for name, way in ways.items()},
        moved={name: way.bytes for name, way in ways.items()},
        writing=writing,
        lossy=books.settings.compression,
        leaks=tuple(leaks(books)),
    )


def leaks(books: Books) -> list[str]:
    """Compare the count of every block with what rows and copies hold (with the lock)."""
    held: Counter[tuple[int, int]] = Counter()
    for row in list(books.device.rows):
        for group, chain in enumerate(row.chains):
            held.update((group, block) for block in (*chain.blocks, *chain.retired) if block is not None)
    for hold in books.holds:
        held.update((hold.group, block) for block in hold.blocks)
    found = []
    for group, ground in enumerate(books.device.grounds):
        for block in (*range(ground.blocks), *ground.in_the_way(ground.blocks)):
            count, want = ground.count(block), held[group, block]
            if count != want:
                found.append(f"block {block} of {books.geometry.groups[group].name}: {count} holders, {want} known")
    return found


def place_of(one: Conversation, books: Books, below: Below) -> Place:
    """Tell where a conversation rests (with the lock)."""
    if one.parked is not None:
        return Place.PARKED
    if one.active or one.kept is None:
        return Place.ACTIVE
    if one.kept.batch.length and one.kept.batch.length >= len(one.tokens):
        return Place.WARM
    if one.kept.batch.length:
        return Place.PARTLY
    if not one.links:
        return Place.GONE
    node = books.known.get(one.links[-1][0])
    if node is not None and any(handle is not None for handle in node.host):
        return Place.HOST
    return Place.COLD if below.cold is not None else Place.GONE


def _device(books: Books, places: Counter[Place]) -> TierReport:
    device = books.device
    here = places[Place.ACTIVE] + places[Place.WARM] + places[Place.PARTLY]
    blocks = sum(ground.taken for ground in device.grounds)
    return TierReport("device", device.used_bytes, device.memory, device.peak, blocks, here)


def _host(below: Below, places: Counter[Place]) -> TierReport | None:
    if below.host is None:
        return None
    host = below.host
    return TierReport("host", host.used, host.cap, host.peak, len(host), places[Place.HOST], host.pinned)


def _disk(usage: Usage | None, places: Counter[Place]) -> TierReport | None:
    if usage is None:
        return None
    return TierReport("disk", usage.bytes, usage.cap, None, usage.blocks, places[Place.COLD])
