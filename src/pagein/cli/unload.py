"""``pagein unload``."""

from __future__ import annotations

from pagein.cli.act import act
from pagein.cli.options import Json, ModelName, StateDir, Url


def unload(model: ModelName, url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Unload a model once nobody uses it.

    Returns once its memory is measured to be back. The next request for it loads it again.
    """
    act(model, "unload", url, state_dir, json)
