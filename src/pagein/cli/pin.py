"""``pagein pin``."""

from __future__ import annotations

from pagein.cli.act import act
from pagein.cli.options import Json, ModelName, StateDir, Url


def pin(model: ModelName, url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Keep a model in memory whatever happens.

    A pinned model is never evicted, until it is unpinned or the daemon restarts. Pinning does not load it.
    """
    act(model, "pin", url, state_dir, json)
