"""Result files: one shape for every benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common import page
from common.host import describe_host


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: Pagein's number beside a peer's; None where there is none."""

    what: str
    unit: str
    ours: float | None
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None


def row(
    what: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    peer_name: str | None = None,
    *,
    below: float | None = None,
    at_most: float | None = None,
    ratio_at_most: float | None = None,
    ratio_at_least: float | None = None,
) -> Row:
    """One comparison, with one goal or none: ours below or at most a number, or a bound of the ratio ours : peer."""
    ratio = ours / peer if peer is not None and peer > 0 and ours > 0 else None
    goal, met = None, None
    if below is not None:
        goal, met = f"below {below:g} {unit}", ours < below
    elif at_most is not None:
        goal, met = f"at most {at_most:g} {unit}".strip(), ours <= at_most
    elif ratio is not None and ratio_at_most is not None:
        goal, met = f"ratio at most {ratio_at_most:g}", ratio <= ratio_at_most
    elif ratio is not None and ratio_at_least is not None:
        goal, met = f"ratio at least {ratio_at_least:g}", ratio >= ratio_at_least
    return Row(what, unit, _short(ours), _short(peer), peer_name, _short(ratio), goal, met)


def _short(number: float | None) -> Any:
    """Four digits that count."""
    return None if number is None else float(f"{number:.4g}")


def write(name: str, setup: dict[str, Any], rows: Sequence[Row], host: dict[str, Any]) -> Path:
    """Write ``results/NAME.json`` and the page of all results; returns the path of the first."""
    result = {
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "host": host,
        "setup": setup,
        "rows": [asdict(each) for each in rows],
    }
    page.RESULTS.mkdir(exist_ok=True)
    path = page.RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    page.render()
    return path


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for name in ("Pagein", "peer"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("ratio", justify="right")
    table.add_column("goal")
    for each in rows:
        mark = {True: " ✓", False: " ✗", None: ""}[each.met]
        table.add_row(
            each.what,
            "–" if each.ours is None else f"{each.ours:g} {each.unit}",
            "–" if each.peer is None else f"{each.peer:g}",
            each.peer_name or "",
            "–" if each.ratio is None else f"{each.ratio:.3g}",
            (each.goal or "") + mark,
        )
    Console(width=None if Console().is_terminal else 140).print(table)


__all__ = ["Row", "describe_host", "row", "show", "write"]
