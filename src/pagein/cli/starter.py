"""The text of a starter configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from pagein.catalog.model import Format, ModelInfo
from pagein.catalog.recipes import RECIPE_CAPABILITIES, guess_recipe
from pagein.cli.find_models import Found
from pagein.units import format_bytes

_HEAD = """\
# Pagein serves the models below within one memory budget; check it with `pagein check`, start it with `pagein serve`.
# Every setting with its meaning: `docs/reference/configuration.md`.

# Memory for all models together: a size (6GiB) or a share (85%) of this machine's memory. Not set: 90 %.
#budget: 6GiB

"""
_PLAIN = re.compile(r"^[A-Za-z0-9./][A-Za-z0-9._/+-]*$")
_TASKS_SHOWN = 8
_NUMBER = re.compile(r"^[\d.eE+-]+$")


def starter(found: Sequence[Found], base: Path) -> str:
    """Return a configuration with the models found; paths under ``base`` are written relative to it."""
    if not found:
        return _HEAD + "#models:\n#  chat:\n#    model: path/to/model.gguf\n"
    return _HEAD + "models:\n" + "\n".join(_entry(model, base) for model in found)


def _entry(found: Found, base: Path) -> str:
    lines = [
        f"  {_scalar(found.name)}:  # {_facts(found.info)}",
        f"    model: {_scalar(_relative(found.info.path, base))}",
    ]
    if found.info.format in (Format.ONNX, Format.ORT):
        told = guess_recipe(found.info)
        choices = ", ".join(RECIPE_CAPABILITIES)
        lines.append(f"    recipe: {told}" if told else f"    #recipe: …  # say what it does: {choices}")
    return "\n".join(lines) + "\n"


def _facts(info: ModelInfo) -> str:
    facts = [info.format.value, info.architecture or "", format_bytes(info.weight_bytes)]
    if info.parameters is not None:
        facts.append(f"{info.parameters / 1e6:.3g} M parameters")
    if info.split is not None:
        served = [name for name, task in sorted(info.split.tasks.items()) if task.capabilities]
        more = ["…"] if len(served) > _TASKS_SHOWN else []
        facts.append(f"tasks {' '.join([*served[:_TASKS_SHOWN], *more])}" if served else "no task that is served")
    return ", ".join(" ".join(fact.split()) for fact in facts if fact)


def _relative(path: Path, base: Path) -> str:
    full = path.absolute()
    return str(full.relative_to(base)) if full.is_relative_to(base) else str(full)


def _scalar(text: str) -> str:
    """Write a string so that YAML reads exactly it."""
    return text if _PLAIN.match(text) and not _NUMBER.match(text) else json.dumps(text, ensure_ascii=False)
