"""What a caller offers to the store: everything about a snapshot but its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagein.kv.snapshots.header import Fact, Header, digest_tokens, pack_tokens
from pagein.kv.snapshots.key import Fingerprint


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that might be kept; `Store.can_put` and `Store.put` take the same."""

    fingerprint: Fingerprint
    tokens: Sequence[int]
    """The token ids that the payload holds the KV of: the last sampled token has none yet."""
    payload_bytes: int
    """As expected for the question; exact for the act, where a payload that is a file counts by its own size."""
    conversation: str | None = None
    """Snapshots of one conversation replace each other as it grows; those without a name do so among themselves."""
    whole_only: bool = False
    """The engine cannot cut this state back to fewer tokens (recurrent and sliding-window models)."""
    seconds_saved: float | None = None
    """What a restore saves, for the choice of who leaves first; see `worth.Verdict`."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What only the engine understands; comes back in the header."""

    def header(self, created: float, payload_bytes: int) -> tuple[Header, bytes]:
        """The header and the packed token ids; ValueError for what no header can hold."""
        packed = pack_tokens(self.tokens)
        header = Header(
            self.fingerprint,
            len(packed) // 4,
            digest_tokens(packed),
            payload_bytes,
            created,
            self.conversation,
            self.whole_only,
            self.seconds_saved,
            self.facts,
        )
        header.encode()
        return header, packed
