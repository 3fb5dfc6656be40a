"""``pagein version``."""

from __future__ import annotations

import platform

from pagein import __version__
from pagein.cli.options import Json


def version(json: Json = False) -> None:
    """Print the version."""
    python = platform.python_version()
    if json:
        import json as encoder

        print(encoder.dumps({"pagein": __version__, "python": python, "platform": platform.platform()}))
    else:
        print(f"pagein {__version__} (Python {python}, {platform.system()} {platform.machine()})")
