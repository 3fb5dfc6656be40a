"""What the store knows of its snapshots, in memory: who begins as a prompt does, who replaces whom, who may leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from pagein.kv.snapshots.answers import Entry, Match, Miss, MissKind
from pagein.kv.snapshots.header import Header
from pagein.kv.snapshots.key import Fingerprint
from pagein.kv.snapshots.prefix import PrefixIndex
from pagein.kv.snapshots.value import Candidate

MOST_BRANCHES = 4
"""Snapshots of one conversation that go on differently (edited turns, forks)."""


class Index:
    """The snapshots by id, by fingerprint and by conversation. No disk, no lock: the store's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._tokens: dict[str, bytes] = {}
        self._used: dict[str, float] = {}
        self._pins: dict[str, int] = {}
        self._prefixes: dict[str, PrefixIndex] = {}
        self._fingerprints: dict[str, Fingerprint] = {}
        self._conversations: dict[tuple[str, str | None], set[str]] = {}
        self._by_tokens: dict[tuple[str, str], set[str]] = {}
        """Ids by the digests of fingerprint and tokens."""
        self.bytes = 0
        """Of all snapshots' files."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, snapshot: str) -> Entry | None:
        """Return a snapshot by its id."""
        return self._entries.get(snapshot)

    def entries(self) -> list[Entry]:
        """All snapshots, the last used first."""
        return sorted(self._entries.values(), key=lambda entry: (-self._used[entry.id], entry.id))

    def add(self, entry: Entry, packed: bytes, used: float) -> None:
        """Add a snapshot with its packed token ids."""
        assert entry.id not in self._entries
        fingerprint = entry.header.fingerprint
        self._entries[entry.id], self._tokens[entry.id], self._used[entry.id] = entry, packed, used
        self._fingerprints[fingerprint.digest] = fingerprint
        self._prefixes.setdefault(fingerprint.digest, PrefixIndex()).add(entry.id, packed, entry.bytes)
        for groups, key in self._groups(entry.header):
            groups.setdefault(key, set()).add(entry.id)
        self.bytes += entry.bytes

    def remove(self, snapshot: str) -> None:
        """Take a snapshot out; one that is not here does no harm."""
        entry = self._entries.pop(snapshot, None)
        if entry is None:
            return
        digest = entry.header.fingerprint.digest
        del self._tokens[snapshot], self._used[snapshot]
        self._pins.pop(snapshot, None)
        self._prefixes[digest].remove(snapshot)
        if not len(self._prefixes[digest]):
            del self._prefixes[digest], self._fingerprints[digest]
        for groups, key in self._groups(entry.header):
            groups[key].discard(snapshot)
            if not groups[key]:
                del groups[key]
        self.bytes -= entry.bytes

    def renew(self, found: Iterable[tuple[Entry, bytes, float]]) -> None:
        """Put what was found on disk in place of everything; pins stay with their snapshots."""
        pins = dict(self._pins)
        for snapshot in list(self._entries):
            self.remove(snapshot)
        for entry, packed, used in found:
            self.add(entry, packed, used)
        self._pins = {snapshot: count for snapshot, count in pins.items() if snapshot in self._entries}

    # --- find --------------------------------------------------------------------------------------------------------

    def longest_match(self, fingerprint: Fingerprint, packed: bytes, at_least: int) -> Match | Miss:
        """Return the snapshot that begins as the prompt does for longest, or why there is none."""
        prompt = len(packed) // 4
        uncut: tuple[int, Entry] | None = None
        nearest = 0
        prefixes = self._prefixes.get(fingerprint.digest)
        for common, snapshot in prefixes.candidates(packed) if prefixes is not None else ():
            nearest = max(nearest, common)
            if common < max(at_least, 1):
                break
            entry = self._entries[snapshot]
            # The last token of a prompt must be computed, so a state that cannot be cut back has to end before it.
            if not entry.header.whole_only or common == entry.header.tokens < prompt:
                return Match(entry, common)
            uncut = uncut or (common, entry)
        if uncut is not None:
            common, entry = uncut
            return Miss(
                MissKind.UNCUT,
                f"the snapshot's {entry.header.tokens} tokens share {common} with the prompt's {prompt}, "
                "and this model's state cannot be cut back",
            )
        return self._other_settings(fingerprint, packed, at_least) or self._nothing(prefixes, nearest, at_least)

    def _other_settings(self, fingerprint: Fingerprint, packed: bytes, at_least: int) -> Miss | None:
        """The miss of tokens that are here, but of another fingerprint; other tenants' are never looked at."""
        found: list[tuple[int, int, str, list[str]]] = []
        for digest, other in self._fingerprints.items():
            if other.tenant != fingerprint.tenant or digest == fingerprint.digest:
                continue
            common, _ = next(self._prefixes[digest].candidates(packed))
            if common >= max(at_least, 1):
                differences = fingerprint.differences(other)
                found.append((-common, len(differences), digest, differences))
        if not found:
            return None
        common, _, _, differences = min(found)
        return Miss(
            MissKind.SETTINGS, f"{-common} of these tokens are stored, but not for this: " + "; ".join(differences)
        )

    @staticmethod
    def _nothing(prefixes: PrefixIndex | None, nearest: int, at_least: int) -> Miss:
        if prefixes is None:
            return Miss(MissKind.EMPTY, "no snapshot is stored for this model with these settings")
        return Miss(
            MissKind.TOKENS,
            f"the nearest of {len(prefixes)} snapshots begins with {nearest} tokens of the prompt, "
            f"at least {max(at_least, 1)} must be the same",
        )

    # --- one conversation --------------------------------------------------------------------------------------------

    def covering(self, header: Header, packed: bytes) -> Entry | None:
        """Return a snapshot that serves everything that one with this header would; None where there is none."""
        for snapshot in self._family(header):
            tokens = self._tokens[snapshot]
            can_cut = not (header.whole_only or self._entries[snapshot].header.whole_only)
            if tokens == packed or (can_cut and tokens.startswith(packed)):
                return self._entries[snapshot]
        same = self._by_tokens.get((header.fingerprint.digest, header.tokens_digest), ())
        return self._entries[min(same)] if same else None  # another conversation, word for word

    def replaced_by(self, header: Header, packed: bytes) -> list[str]:
        """Snapshots of the same conversation that one with this header extends.

        Where a state cannot be cut back, the longest of them stays: it serves an edited last turn.
        """
        extended = [one for one in self._family(header) if packed.startswith(self._tokens[one])]
        if header.whole_only:
            shorter = sorted(
                (one for one in extended if self._tokens[one] != packed), key=lambda one: len(self._tokens[one])
            )
            return shorter[:-1] + [one for one in extended if self._tokens[one] == packed]
        return extended

    def outgrown(self) -> list[str]:
        """Snapshots that another of their conversation extends, left where a crash came before they could leave."""
        found: list[str] = []
        for family in self._conversations.values():
            ordered = sorted(family, key=lambda one: self._tokens[one])
            for one, following in pairwise(ordered):  # who is a prefix at all, is one of the next
                whole_only = self._entries[one].header.whole_only or self._entries[following].header.whole_only
                if not whole_only and self._tokens[following].startswith(self._tokens[one]):
                    found.append(one)
        return found

    def surplus(self, newest: Entry) -> list[str]:
        """Branches of a conversation beyond the most that are kept, the longest unused first."""
        if newest.header.conversation is None:
            return []
        family = sorted(self._family(newest.header), key=lambda one: (-self._used[one], one != newest.id))
        return [one for one in family[MOST_BRANCHES:] if one not in self._pins]

    def of_conversation(self, conversation: str, tenant: str) -> list[str]:
        """All snapshots that a tenant has of a conversation, of all fingerprints."""
        families = [family for (_, name), family in self._conversations.items() if name == conversation]
        named = [one for family in families for one in family]
        return [one for one in named if self._entries[one].header.fingerprint.tenant == tenant]

    def _groups(self, header: Header) -> tuple[tuple[dict[Any, set[str]], object], ...]:
        digest = header.fingerprint.digest
        return (self._conversations, (digest, header.conversation)), (self._by_tokens, (digest, header.tokens_digest))

    def _family(self, header: Header) -> list[str]:
        return sorted(self._conversations.get((header.fingerprint.digest, header.conversation), ()))

    # --- who may leave -----------------------------------------------------------------------------------------------

    def pin(self, snapshot: str) -> bool:
        """Count a pin; False for a snapshot that is not here."""
        if snapshot not in self._entries:
            return False
        self._pins[snapshot] = self._pins.get(snapshot, 0) + 1
        return True

    def unpin(self, snapshot: str) -> None:
        """End a pin; one that ended before does no harm."""
        count = self._pins.pop(snapshot, 0)
        if count > 1:
            self._pins[snapshot] = count - 1

    def pass_pin_on(self, old: str, new: str) -> None:
        """Let a snapshot inherit the pins of the one that it replaces."""
        count = self._pins.pop(old, 0)
        if count:
            self._pins[new] = self._pins.get(new, 0) + count

    def touch(self, snapshot: str, now: float) -> None:
        """Note a use."""
        if snapshot in self._used:
            self._used[snapshot] = now

    def idle_seconds(self, snapshot: str) -> float | None:
        """How long a snapshot was not used; None for one that is not here."""
        used = self._used.get(snapshot)
        return None if used is None else max(self._clock() - used, 0.0)

    def idle_for(self, seconds: float) -> list[str]:
        """Snapshots that were not used for longer, but for the pinned ones."""
        now = self._clock()
        return [one for one, used in self._used.items() if now - used > seconds and one not in self._pins]

    def candidates(self, replaced: Iterable[str]) -> list[Candidate]:
        """All snapshots that may leave: those that are not pinned."""
        now, gone = self._clock(), set(replaced)
        return [
            Candidate(
                entry.id,
                entry.bytes,
                entry.header.tokens,
                max(now - self._used[entry.id], 0.0),
                entry.header.seconds_saved,
                entry.id in gone,
            )
            for entry in self._entries.values()
            if entry.id not in self._pins
        ]
