"""Where the daemon is: given, remembered in its state folder, or the default address."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagein.errors import BadUsage, DaemonUnreachable

ADDRESS_FILE = "daemon.json"
"""Written by the daemon into its state folder: ``{"pid": …, "address": "http://…"}``."""
DEFAULT_CONFIG = Path("pagein.yaml")
CONFIG_VARIABLE = "PAGEIN_CONFIG"
KEY_VARIABLE = "PAGEIN_SERVER__API_KEY"
_DEFAULT_URL = "http://127.0.0.1:7311"


@dataclass(frozen=True, slots=True)
class Daemon:
    """Where to ask, with which key, and how the address was found."""

    url: str
    source: str
    key: str | None = None


def find_daemon(url: str | None, state_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Daemon:
    """Return the daemon's address: the one given, else the one in its state folder, else the default.

    Raises DaemonUnreachable where a folder is given and no daemon of it runs: another's must not be told instead.
    """
    key = environ.get(KEY_VARIABLE) or None
    given = url or environ.get("PAGEIN_URL")
    if given:
        return Daemon(_normal(given), "given", key)
    folder = state_dir or _state_dir(environ)
    remembered = _remembered(folder / ADDRESS_FILE)
    if remembered is not None:
        return Daemon(_normal(remembered), str(folder / ADDRESS_FILE), key)
    if state_dir is not None:
        raise DaemonUnreachable(
            f"no daemon of {state_dir} runs: {folder / ADDRESS_FILE} names none",
            hint="start one with 'pagein serve', or say where it is with --url",
        )
    return Daemon(_DEFAULT_URL, "the default address", key)


def config_path(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the configuration to use: given, ``$PAGEIN_CONFIG``, or ``pagein.yaml`` here."""
    return given or Path(environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG)


def _normal(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    if not full.startswith(("http://", "https://")):
        raise BadUsage(f"not an address of a daemon: {url!r}", hint="write it as http://127.0.0.1:7311")
    return full.rstrip("/")


def _remembered(path: Path) -> str | None:
    """Return the address in the file, or None when there is none or its daemon is gone."""
    try:
        body = json.loads(path.read_text())
        pid, address = int(body["pid"]), str(body["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if _is_running(pid) else None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process, but there
        return True
    except (OSError, OverflowError):
        return False
    return True


def _state_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("PAGEIN_STATE_DIR"):
        return Path(environ["PAGEIN_STATE_DIR"]).expanduser()
    import platformdirs

    return _configured(config_path(None, environ)) or Path(platformdirs.user_state_dir("pagein"))


def _configured(config: Path) -> Path | None:
    """Read ``state_dir`` alone: finding the daemon must work even while the file has a fault elsewhere."""
    import yaml

    try:
        body = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    folder = body.get("state_dir") if isinstance(body, dict) else None
    return config.parent / Path(folder).expanduser() if isinstance(folder, str) else None
