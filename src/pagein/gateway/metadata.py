"""Metadata that a client attaches to a response or a conversation: texts by name, within OpenAI's bounds."""

from __future__ import annotations

from pagein.errors import BadRequest

_PAIRS = 16
_LONGEST_KEY = 64
_LONGEST_VALUE = 512


def read_metadata(value: object) -> dict[str, str]:
    """Read ``metadata``, none being no pairs; raises BadRequest."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadRequest("`metadata` must be an object of texts", param="metadata")
    if len(value) > _PAIRS:
        raise BadRequest(f"`metadata` has {len(value)} pairs, at most {_PAIRS} are kept", param="metadata")
    for key, text in value.items():
        if len(key) > _LONGEST_KEY or len(text) > _LONGEST_VALUE:
            raise BadRequest(
                f"`metadata`: the key {key[:_LONGEST_KEY]!r} has {len(key)} characters and its value {len(text)}, "
                f"at most {_LONGEST_KEY} and {_LONGEST_VALUE} are kept",
                param="metadata",
            )
    return value
