"""The parts of the page that tell of scenarios and storms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LINES = (
    ("seconds", "seconds: {}"),
    ("seed", "seed {}"),
    ("limits", "`supervisor.limits: {}`"),
    ("rounds", "rounds: {}"),
    ("requests", "requests: {}"),
    ("clients", "clients: {}"),
    ("load", "load: {}"),
    ("bound", "bound of the wait: {}"),
    ("budget_and_margin", "{}"),
    ("at_rest", "the daemon at rest: {}"),
)


def details_of(setup: dict[str, Any]) -> Iterator[str]:
    """What a storm was, and what happened in it how often."""
    if "counts" not in setup and "bound" not in setup and "load" not in setup:
        return
    told = [text.format(setup[key]) for key, text in _LINES if key in setup]
    yield f"- {'; '.join(told)}"
    if "models" in setup:
        yield f"- models: {', '.join(f'`{name}`' for name in setup['models'])}"
    if "wait_seconds" in setup:
        yield f"- wait for a model: {', '.join(f'{share} {s:g} s' for share, s in setup['wait_seconds'].items())}"
    if setup.get("counts"):
        yield f"- counts: {', '.join(f'{what} {count}' for what, count in setup['counts'].items())}"


def scenario_table(setup: dict[str, Any]) -> Iterator[str]:
    """One line per scenario, with the verdict of each manager; then the evidence."""
    for about in setup["managers"].values():
        yield f"- {about}"
    names = list(setup["managers"])
    yield f"\n| | scenario | {' | '.join(names)} | scaled |"
    yield f"|---:|---|{'---|' * (len(names) + 1)}"
    for row in setup["scenarios"]:
        verdicts = (_short(row["verdicts"][name]) for name in names)
        yield f"| {row['number']} | {row['what']} | {' | '.join(verdicts)} | {row['scale']} |"
    passed = {name: _counted(setup, name) for name in names}
    yield f"\n{'; '.join(f'{name}: {told}' for name, told in passed.items())}. The evidence:\n"
    for row in setup["scenarios"]:
        for name in names:
            verdict = row["verdicts"][name]
            yield f"- {row['number']}, {name}: {verdict['result']}: {_plain(verdict['evidence'])}"
    yield ""


def _short(verdict: dict[str, str]) -> str:
    """The verdict, and whether only a part of the scenario could be asked of the manager."""
    return verdict["result"] + (" (in part)" if verdict["evidence"].startswith("in part:") else "")


def _counted(setup: dict[str, Any], name: str) -> str:
    results = [row["verdicts"][name]["result"] for row in setup["scenarios"]]
    return ", ".join(f"{results.count(result)} {result}" for result in ("pass", "fail", "n/a"))


def _plain(text: str) -> str:
    """Text of others, so that nothing in it is read as mark-up."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
