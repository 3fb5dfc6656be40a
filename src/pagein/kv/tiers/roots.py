"""The root keys of a pool: one per tenant, made of what computes here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagein.kv.blocks.keys import root_key
from pagein.kv.cache.fingerprint import active_adapters, attention_of
from pagein.kv.tiers.conversation import Conversation

if TYPE_CHECKING:
    from pagein.kv.tiers.cold import Cold


class Roots:
    """Computes roots, and remembers whose they are. The disk asks by root; the pool's lock guards it."""

    def __init__(self, model: Any, fields: Mapping[str, str], adapters: Mapping[str, str]) -> None:
        self._model, self._fields, self._adapters = model, dict(fields), dict(adapters)
        self._made: dict[tuple[str, str, str], tuple[bytes, dict[str, str]]] = {}
        self.tenants: dict[bytes, str] = {}
        self.labels: dict[bytes, str] = {}
        """What the disk calls a model: a name for people, and a few digits of each field."""

    def of(self, tenant: str) -> tuple[bytes, dict[str, str]]:
        """Return root and fields for a tenant, with the adapters that are active now."""
        now = (tenant, active_adapters(self._model, self._adapters), attention_of(self._model))
        if now not in self._made:
            fields = {**self._fields, "tenant": tenant, "adapter": now[1], "attention": now[2]}
            root = root_key(fields)
            self._made[now] = (root, fields)
            self.tenants[root], self.labels[root] = tenant, _label(fields)
        return self._made[now]

    def changed(self, one: Conversation, cold: Cold | None) -> str:
        """Tell which fields differ from those that the disk has a conversation with; "" where there is none."""
        if cold is None or one.name is None:
            return ""
        mine = _parts(self.labels[one.root])
        for entry in cold.store.entries():
            other = _parts(entry.model)
            if (entry.conversation, entry.tenant) == (one.name, one.tenant) and other and other != mine:
                names = sorted(name for name in mine if other.get(name) != mine[name])
                return f"on the disk it was computed with other {', '.join(names)}"
        return ""


def _label(fields: Mapping[str, str]) -> str:
    parts = [
        f"{name}={hashlib.sha256(text.encode()).hexdigest()[:8]}"
        for name, text in sorted(fields.items())
        if name not in ("model", "tenant")
    ]
    return f"{fields['model']} [{' '.join(parts)}]"


def _parts(label: str) -> dict[str, str]:
    """The digits of each field; nothing where a label is not of this kind."""
    _, _, inner = label.partition(" [")
    pairs = [part.split("=", 1) for part in inner.rstrip("]").split() if "=" in part]
    return {pair[0]: pair[1] for pair in pairs}
