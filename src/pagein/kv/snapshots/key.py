"""The fingerprint of a snapshot: everything that must be the same before its bytes may reach an engine (rule 7)."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

_TAG = b"pagein kv fingerprint 1\n"
_TENANT = b"pagein kv tenant 1\n"
_MEDIA = b"pagein kv media 1\n"
NO_TOKEN = 2**31
"""Vocabularies end far below."""
MOST_SETTINGS = 64
"""Entries of one mapping, and adapters, at most."""
LONGEST_TEXT = 1024
_WORDS = {
    "weights": "weights",
    "quantisation": "quantisation",
    "kv_type_k": "KV type of K",
    "kv_type_v": "KV type of V",
    "context": "context",
    "engine": "engine",
    "build": "engine build",
    "adapters": "adapters",
    "tenant": "tenant",
}


@dataclass(frozen=True)
class Fingerprint:
    """What a snapshot was made with; a model's name is no part of it. Equal ones have equal digests."""

    weights: str
    """Digest of the content of the weight files (`weights.WeightDigests`); not a name, not a sample."""
    quantisation: str
    kv_type_k: str
    kv_type_v: str
    context: int
    """Tokens that the engine's context holds."""
    engine: str
    build: str
    """Version and build of the engine: another build may lay its cells out otherwise."""
    tenant: str
    """See `tenant_tag`."""
    rope: Mapping[str, str]
    """RoPE settings as the engine runs them, as text: base, scale, kind of scaling."""
    layout: Mapping[str, str]
    """What else changes the layout of the bytes: flash attention, full or sliding cache, one or several streams."""
    adapters: tuple[str, ...] = ()
    """Digest and strength of each adapter, in the engine's order."""

    @cached_property
    def digest(self) -> str:
        """64 hex digits over the canonical encoding."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(_TAG + text.encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**value, "rope": dict(self.rope), "layout": dict(self.layout), "adapters": list(self.adapters)}

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Read what `to_json` wrote; ValueError for anything else."""
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
            raise ValueError("the fingerprint lacks a field or has an unknown one")
        adapters = value["adapters"]
        if not isinstance(adapters, list) or len(adapters) > MOST_SETTINGS:
            raise ValueError("the fingerprint's adapters are not a short list")
        context = value["context"]
        if type(context) is not int or context < 0:
            raise ValueError(f"the fingerprint's context is {context!r}")
        read = {name: _text(name, value[name]) for name in _WORDS if name not in ("context", "adapters")}
        rope, layout = _settings("rope", value["rope"]), _settings("layout", value["layout"])
        named = tuple(_text("adapters", adapter) for adapter in adapters)
        return cls(**read, context=context, rope=rope, layout=layout, adapters=named)

    def differences(self, other: Fingerprint) -> list[str]:
        """Name each field that a stored fingerprint (``other``) has otherwise, with both values."""
        found: list[str] = []
        for name, words in _WORDS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name == "tenant":  # the tags are nobody's business
                found.append("tenant: another one")
                continue
            found.append(f"{words}: {_shown(mine)}, the snapshot has {_shown(theirs)}")
        for group in ("rope", "layout"):
            mine, theirs = getattr(self, group), getattr(other, group)
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    has = [_shown(side.get(name, "nothing")) for side in (mine, theirs)]
                    found.append(f"{group} {name}: {has[0]}, the snapshot has {has[1]}")
        return found


def tenant_tag(secret: bytes, tenant: str) -> str:
    """Return what stands for a tenant in fingerprints: an HMAC, so that neither the secret nor the key is on disk."""
    return hmac.new(secret, _TENANT + tenant.encode(), hashlib.sha256).hexdigest()


def media_tokens(digest: str, count: int) -> list[int]:
    """Return what stands for an image or a sound of ``count`` positions among token ids: never a real token's.

    The engine's own ids are the same for every image (scenario 20 of the KV list); these differ with its digest.
    """
    found: list[int] = []
    while len(found) < count:
        block = hashlib.sha256(_MEDIA + f"{digest}:{len(found)}".encode()).digest()
        found += [number | NO_TOKEN for number in struct.unpack("<8I", block)]
    return found[:count]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ValueError(f"the fingerprint's {name} is not a short text")
    return value


def _settings(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MOST_SETTINGS:
        raise ValueError(f"the fingerprint's {name} is not a short object")
    return {_text(name, key): _text(name, setting) for key, setting in value.items()}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in value) or "none"
    text = str(value)
    is_digest = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return f"{text[:12]}…" if is_digest else text
