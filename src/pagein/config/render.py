"""The example file, and both rendered files written or checked: ``python -m pagein.config.render [--check]``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from pagein.config.describe import absent_text, example_text, meaning
from pagein.config.reference import render_reference
from pagein.config.schema import Model, Section, Settings, section_of

EXAMPLE_FILE = Path("pagein.example.yaml")
REFERENCE_FILE = Path("docs/reference/configuration.md")
_COMMAND = "python -m pagein.config.render"

_EXAMPLE_HEAD = f"""\
# Every setting of Pagein, with its meaning and its default.
# Rendered from the schema by `{_COMMAND}`: edit src/pagein/config/schema.py instead.
#
# A key right after a `#` is not set: what stands there is its default, or an example where it has none.
# Take the `#` away to set it. Sizes: 6GiB, 500MB, 1024. Shares: 85%, 0.85. Durations: 250ms, 30s, 5m, 1h30m.
# Relative paths start at the folder of this file. Details: {REFERENCE_FILE}
"""

_EXAMPLE_MODELS = """
  # Speech recognition, used now and then: it leaves memory right after its last request.
  speech:
    model: models/whisper-tiny.en
    priority: low

  # Any server with an OpenAI-style API, started and stopped like every other model.
  search:
    command: my-embedding-server --port ${port}
    capabilities: [embedding]
    memory: 600MiB

  # A split model (`pagein split apply`): a request for `assistant:summarise` brings in what that task needs, and
  # nothing of the other tasks. What it keeps within is `memory`.
  assistant:
    model: models/assistant-split
    memory: 1500MiB
"""


def render_example() -> str:
    """Return the text of ``pagein.example.yaml``: every key, commented, and four models."""
    return "\n".join([_EXAMPLE_HEAD, *_example_keys(Settings, ""), _EXAMPLE_MODELS])


def _example_keys(section: type[Section], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of((name,)) if section is Settings else None
        if inner is not None:
            yield f"# {inner.__doc__}\n{name}:"
            yield from _example_keys(inner, "  ")
            yield ""
        elif name == "models":
            yield f"# {field.description}\nmodels:\n  # {Model.__doc__} Here is every key:\n  chat:"
            yield from _example_keys(Model, "    ")
        else:
            yield from _example_key(name, field, section, indent)
            if section is Settings:
                yield ""


def _example_key(name: str, field: FieldInfo, section: type[Section], indent: str) -> Iterator[str]:
    absent = absent_text(field)
    text = meaning(name, field, section) + (f" Default: {absent}." if absent else "")
    for line in textwrap.wrap(text, 110 - len(indent)):
        yield f"{indent}# {line}"
    mark = "" if section is Model and name == "model" else "#"
    yield f"{indent}{mark}{name}: {example_text(field)}"


FILES: dict[Path, Callable[[], str]] = {EXAMPLE_FILE: render_example, REFERENCE_FILE: render_reference}
"""Every rendered file, from the root of the repository, with what renders it."""


def stale_files(root: Path) -> list[Path]:
    """Return the rendered files that are missing or not current."""
    return [path for path, render in FILES.items() if _text_of(root / path) != render()]


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: list[str] | None = None) -> int:
    """Write the rendered files, or only check them; returns the exit status."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    parser.add_argument("--root", type=Path, default=Path(), help="root of the repository (default: current folder)")
    given = parser.parse_args(arguments)
    if not (given.root / "pyproject.toml").is_file():
        parser.error(f"{given.root.absolute()} is not the root of the repository: it has no pyproject.toml")
    stale = stale_files(given.root)
    for path in stale:
        if given.check:
            print(f"{path} is not current: run {_COMMAND}", file=sys.stderr)
            continue
        (given.root / path).parent.mkdir(parents=True, exist_ok=True)
        (given.root / path).write_text(FILES[path](), encoding="utf-8")
        print(f"wrote {path}")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
