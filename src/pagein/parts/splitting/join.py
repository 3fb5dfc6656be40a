"""``python -m pagein.parts.splitting.join``: one part joins a split, in a process that may need torch for it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pagein.errors import PageinError
from pagein.parts.splitting.joining import join_replacement


def main(arguments: list[str]) -> int:
    """Write as told, and tell it in a line of JSON; the exit code is the error's."""
    parser = argparse.ArgumentParser("pagein.parts.splitting.join")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--replaces", required=True)
    options = parser.parse_args(arguments)
    try:
        plan = join_replacement(options.folder, options.source, options.replaces, options.part).plan
    except PageinError as error:
        _say("error", code=error.code, message=error.message, hint=error.hint)
        return error.exit_code
    made = plan.parts[options.part]
    files = {precision: {"file": one.file, "bytes": one.nbytes} for precision, one in made.files.items()}
    _say("joined", part=made.name, replaces=made.replaces, files=files, plan=plan.digest)
    return 0


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
