"""How a measured module says something: one line of JSON."""

from __future__ import annotations

import json


def say(event: str, **told: object) -> None:
    """Print it for the benchmark to read."""
    print(json.dumps({"event": event, **told}), flush=True)
