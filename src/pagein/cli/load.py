"""``pagein load``."""

from __future__ import annotations

from pagein.cli.act import act
from pagein.cli.options import Json, ModelName, StateDir, Url


def load(model: ModelName, url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Load a model without using it.

    Returns once it is resident; says what it took and what had to leave for it.
    """
    act(model, "load", url, state_dir, json)
