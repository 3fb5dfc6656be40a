"""The reference page of the command line, rendered from the commands: ``python -m pagein.cli.render [--check]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pagein import errors
from pagein.cli.app import COMMANDS, build
from pagein.cli.faults import DEBUG_VARIABLE, INTERRUPTED, NOT_EXECUTABLE, NOT_FOUND
from pagein.cli.help import ADDRESS_NOTE, arguments, describe, options, usage
from pagein.errors import PageinError

REFERENCE_FILE = Path("docs/reference/cli.md")
_COMMAND = "python -m pagein.cli.render"

_HEAD = f"""\
# The command line

<!-- Rendered from the commands by `{_COMMAND}`: edit src/pagein/cli instead. -->

`pagein COMMAND --help` prints the same. Lists and answers go to standard output: with colours and fitted to the width
on a terminal, as plain unwrapped text in a pipe, as JSON with `--json`. Everything else goes to standard error.
"""

_FINDING = f"""\
## Finding the daemon

{ADDRESS_NOTE} The state folder is `--state-dir`, else `$PAGEIN_STATE_DIR`, else the `state_dir` of `$PAGEIN_CONFIG` or
of `pagein.yaml` in the current folder, else the platform's folder for state. A `daemon.json` whose process is gone is
passed over; with `--state-dir` no other daemon is asked then. Where the daemon asks for an API key, set it as
`PAGEIN_SERVER__API_KEY`.
"""

_VARIABLES = f"""\
## Environment variables

| variable | meaning |
|---|---|
| `PAGEIN_URL` | address of the daemon |
| `PAGEIN_CONFIG` | configuration that `serve`, `check` and the search for the daemon use, instead of `pagein.yaml` |
| `PAGEIN_SERVER__API_KEY` | API key sent to the daemon |
| `{DEBUG_VARIABLE}` | `1` shows the traceback of an error |
| `NO_COLOR` | any value: no colours |
| `COLUMNS` | width of the output where there is no terminal |

Every setting has a variable of its own: see [configuration](configuration.md).
"""


def render_reference() -> str:
    """Return the text of ``docs/reference/cli.md``."""
    parts = [_HEAD]
    for heading in dict.fromkeys(entry.heading for entry in COMMANDS.values()):
        parts.append(f"## {heading}\n")
        parts += [_command(name) for name, entry in COMMANDS.items() if entry.heading == heading]
    parts += [_FINDING, _exit_codes(), _VARIABLES]
    return "\n".join(parts)


def _command(name: str) -> str:
    command = build(name)
    summary, details = describe(command)
    blocks = [f"### `{usage(command)}`", summary, *details]
    blocks += [_table("argument", arguments(command)), _table("option", options(command))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {title} | meaning |", "|---|---|"]
    lines += ["| `{}` | {} |".format(name.replace("|", "\\|"), meaning.replace("|", "\\|")) for name, meaning in rows]
    return "\n".join(lines)


def _exit_codes() -> str:
    lines = [
        "## Exit codes",
        "",
        "An error is one line `error: …`, with a line `hint: …` where there is something to do.",
        "",
    ]
    lines += ["| code | meaning |", "|---|---|", "| 0 | done |"]
    for code in sorted({kind.exit_code for kind in _kinds(PageinError)}):
        kinds = [kind for kind in _kinds(PageinError) if kind.exit_code == code]
        words = "any other error" if code == PageinError.exit_code else " ".join(_first_line(kind) for kind in kinds)
        lines.append(f"| {code} | {words.rstrip('.')} |")
    lines.append(f"| {NOT_EXECUTABLE} | `lease`: the command cannot be executed |")
    lines.append(f"| {NOT_FOUND} | `lease`: there is no such command |")
    lines.append(f"| {INTERRUPTED} | ended by Ctrl-C |")
    lines += ["", "`lease` becomes its command, so every other code after it is that of the command."]
    return "\n".join(lines) + "\n"


def _first_line(kind: type[PageinError]) -> str:
    return (kind.__doc__ or "").strip().split("\n")[0].split("; used by")[0].rstrip(".") + "."


def _kinds(root: type[PageinError]) -> Iterator[type[PageinError]]:
    for kind in root.__subclasses__():
        if kind.__module__.startswith(f"{errors.__name__}."):  # not what happens to be imported beside
            yield kind
            yield from _kinds(kind)


def main(given: list[str] | None = None) -> int:
    """Write the page, or only check it; returns the exit status."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not current")
    parser.add_argument("--root", type=Path, default=Path(), help="root of the repository (default: current folder)")
    wanted = parser.parse_args(given)
    path = wanted.root / REFERENCE_FILE
    text = render_reference()
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    if wanted.check:
        print(f"{REFERENCE_FILE} is not current: run {_COMMAND}", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {REFERENCE_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
