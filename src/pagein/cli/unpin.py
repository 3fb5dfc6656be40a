"""``pagein unpin``."""

from __future__ import annotations

from pagein.cli.act import act
from pagein.cli.options import Json, ModelName, StateDir, Url


def unpin(model: ModelName, url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Let a pinned model be evicted again."""
    act(model, "unpin", url, state_dir, json)
