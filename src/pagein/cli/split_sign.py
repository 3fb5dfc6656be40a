"""``pagein split sign``: a signature beside a plan. The private key is read from its file, and goes nowhere else."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from rich.text import Text

from pagein.cli.console import print_json, show
from pagein.errors import BadUsage
from pagein.parts.files.signing import needs_passphrase, sign_split

_LIMIT = 64 * 1024


def run_sign(folder: Path, key: Path, json: bool) -> None:
    """Sign, and say where the signature is; raises BadUsage, PlanRefused, SplitBroken."""
    try:
        with key.open("rb") as file:
            text = file.read(_LIMIT)
    except OSError as error:
        raise BadUsage(f"the key {key} cannot be read: {error.strerror}") from None
    path, files = sign_split(folder, text, _passphrase() if needs_passphrase(text) else None)
    if json:
        print_json({"signature": str(path), "files": files})
    else:
        show(Text(f"signed {files} files: {path}", "green"))


def _passphrase() -> bytes:
    if not sys.stdin.isatty():
        raise BadUsage("the private key is encrypted, and there is no terminal to ask for its passphrase on")
    return getpass.getpass("passphrase of the private key: ").encode()
