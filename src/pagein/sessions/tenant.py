"""Whose conversation is whose: by the key that the door checked, or by a salt from the configuration."""

from __future__ import annotations

import hashlib

_LENGTH = 32


def tenant_of(key: str | None, salt: str | None) -> str:
    """Return the name under which a caller's conversations are kept; it gives neither key nor salt away.

    With a salt it does not depend on the key, so a new key keeps the conversations. It never comes from the request:
    a client cannot choose whom it is.
    """
    kind, secret = ("salt", salt) if salt is not None else ("key", key) if key is not None else ("open", "")
    return hashlib.sha256(f"pagein tenant\0{kind}\0{secret}".encode("utf-8", "surrogateescape")).hexdigest()[:_LENGTH]
