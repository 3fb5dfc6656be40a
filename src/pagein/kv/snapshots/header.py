"""The header of a snapshot: what is known about the payload before a byte of it is read. Parsed strictly."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from pagein.kv.snapshots.key import MOST_SETTINGS, Fingerprint

LARGEST_HEADER = 256 * 1024
MOST_TOKENS = 16 * 1024**2
LARGEST_PAYLOAD = 2**42
LONGEST_NAME = 256

Fact = str | int | float | bool | None
"""A plain value."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot says about itself."""

    fingerprint: Fingerprint
    tokens: int
    """Token ids that the payload holds the KV of, in order from the first."""
    tokens_digest: str
    payload_bytes: int
    created: float
    """Seconds since the epoch."""
    conversation: str | None
    """None: the client named none."""
    whole_only: bool
    """The engine cannot cut this state back: it serves only prompts that begin with all its tokens."""
    seconds_saved: float | None
    """What a restore saves against a recompute, as measured when it was written."""
    facts: Mapping[str, Fact]
    """What only the engine understands."""

    def encode(self) -> bytes:
        """The header as canonical JSON; ValueError where it is too large."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value |= {"fingerprint": self.fingerprint.to_json(), "facts": dict(self.facts)}
        data = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > LARGEST_HEADER:
            raise ValueError(f"the header has {len(data)} bytes, the limit is {LARGEST_HEADER}")
        Header.decode(data)  # what would not be read back is not written
        return data

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Read what `encode` wrote; ValueError for anything else."""
        try:
            value = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header is no JSON object: {error}") from error
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
            raise ValueError("the header lacks a field or has an unknown one")
        if type(value["whole_only"]) is not bool:
            raise ValueError(f"the header's whole_only is {value['whole_only']!r}")
        return cls(
            fingerprint=Fingerprint.from_json(value["fingerprint"]),
            tokens=_count("tokens", value["tokens"], MOST_TOKENS),
            tokens_digest=_name("tokens_digest", value["tokens_digest"]),
            payload_bytes=_count("payload_bytes", value["payload_bytes"], LARGEST_PAYLOAD),
            created=_number("created", value["created"]),
            conversation=None if value["conversation"] is None else _name("conversation", value["conversation"]),
            whole_only=value["whole_only"],
            seconds_saved=None if value["seconds_saved"] is None else _number("seconds_saved", value["seconds_saved"]),
            facts=_facts(value["facts"]),
        )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit numbers; ValueError for one that is not such a number."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is not a number of 32 bits: {error}") from error
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The reverse of `pack_tokens`."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def digest_tokens(packed: bytes) -> str:
    """The digest of packed token ids, 64 hex digits."""
    return hashlib.sha256(b"pagein tokens 1\n" + packed).hexdigest()


def _once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the header's {key[:80]!r} comes twice")
        result[key] = value
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"the header has a {text}")


def _count(name: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"the header's {name} is {str(value)[:40]}, it must lie between 0 and {most}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18:  # false for a nan, too
        return float(value)
    raise ValueError(f"the header's {name} is {str(value)[:40]}")


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise ValueError(f"the header's {name} is not a text of 1 to {LONGEST_NAME} characters")
    return value


def _facts(value: object) -> dict[str, Fact]:
    if not isinstance(value, dict) or len(value) > MOST_SETTINGS:
        raise ValueError(f"the header's facts are not an object of at most {MOST_SETTINGS} entries")
    for key, fact in value.items():
        if not (fact is None or isinstance(fact, str | int | float)):
            raise ValueError(f"the header's fact {str(key)[:80]!r} is no plain value")
    return value
