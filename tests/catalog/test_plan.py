"""The plan of `pagein check`."""

from __future__ import annotations

from typing import Any

from pagein.catalog.model import ModelEntry, Need, NeedSource
from pagein.catalog.plan import PlanRow, Verdict, plan
from pagein.config.schema import Model

MIB = 1024**2


def entry(name: str, problem: str | None = None, **need: int) -> ModelEntry:
    """A model that needs so many MiB per pool; ``cuda`` stands for ``cuda:0``."""
    pools = {"cuda:0" if pool == "cuda" else pool: size * MIB for pool, size in need.items()}
    wanted = Need(pools, NeedSource.ESTIMATED, "because")
    return ModelEntry(name, "command", "1", frozenset(), None, "cpu", wanted, wanted, name, problem=problem)


def planned(*models: tuple[ModelEntry, dict[str, Any]], budget: dict[str, int] | int = 1000, daemon: int = 0):
    """Plan these models; budgets in MiB."""
    budgets = {"ram": budget} if isinstance(budget, int) else budget
    rows = plan(
        {entry.name: entry for entry, _ in models},
        {entry.name: Model(command="x", **settings) for entry, settings in models},
        {pool: size * MIB for pool, size in budgets.items()},
        daemon * MIB,
    )
    return {row.model: row for row in rows}


def verdicts(rows: dict[str, PlanRow]) -> dict[str, str]:
    """The verdicts, in the order of the plan."""
    return {name: row.verdict.value for name, row in rows.items()}


def test_what_fits_together_and_what_pages() -> None:
    """In the order of the configuration, what has room beside the others fits, the next one pages."""
    rows = planned((entry("a", ram=400), {}), (entry("b", ram=500), {}), (entry("c", ram=200), {}))
    assert verdicts(rows) == {"a": "fits", "b": "fits", "c": "pages"}
    assert rows["b"].reason == "fits beside a"
    assert rows["c"].reason == "needs 200 MiB of ram, 100 MiB is left beside a, b: others leave for it"
    assert rows["b"].left == {"ram": 100 * MIB}


def test_a_smaller_one_fits_behind_one_that_pages() -> None:
    """A gap is used."""
    rows = planned((entry("a", ram=600), {}), (entry("b", ram=600), {}), (entry("c", ram=300), {}))
    assert verdicts(rows) == {"a": "fits", "b": "pages", "c": "fits"}


def test_kept_models_come_first() -> None:
    """Pinned and high ones stay, wherever they stand in the file; low ones are placed last."""
    rows = planned(
        (entry("low", ram=100), {"priority": "low"}),
        (entry("medium", ram=100), {}),
        (entry("high", ram=100), {"priority": "high"}),
        (entry("pinned", ram=100), {"pin": True, "priority": "low"}),
    )
    assert verdicts(rows) == {"pinned": "stays", "high": "stays", "medium": "fits", "low": "fits"}


def test_never_beside_what_is_kept() -> None:
    """What the budget less the kept models cannot give is refused for ever, with all numbers (rule 4)."""
    rows = planned((entry("big", ram=700), {}), (entry("high", ram=400), {"priority": "high"}))
    assert verdicts(rows) == {"high": "stays", "big": "never"}
    assert rows["big"].reason == (
        "needs 700 MiB of ram, the budget of 1000 MiB can give it at most 600 MiB, with high kept"
    )


def test_a_kept_model_without_room_is_never_loaded() -> None:
    """Two kept models that do not fit together are told at once, and the first keeps its place."""
    rows = planned((entry("a", ram=700), {"pin": True}), (entry("b", ram=700), {"priority": "high"}))
    assert verdicts(rows) == {"a": "stays", "b": "never"}


def test_the_daemon_takes_its_part() -> None:
    """Its own bytes are not available to models."""
    assert verdicts(planned((entry("a", ram=950), {}), daemon=60)) == {"a": "never"}
    assert verdicts(planned((entry("a", ram=940), {}), daemon=60)) == {"a": "fits"}


def test_every_pool_counts() -> None:
    """A model that fits the GPU but not the RAM beside it does not fit; pools are independent else."""
    budget = {"ram": 300, "cuda:0": 1000}
    rows = planned((entry("a", ram=200, cuda=900), {}), (entry("b", ram=50, cuda=500), {}), budget=budget)
    assert verdicts(rows) == {"a": "fits", "b": "pages"}
    assert "of cuda:0" in rows["b"].reason


def test_a_pool_that_is_not_there() -> None:
    """A GPU that the machine lacks is named."""
    rows = planned((entry("a", ram=1, cuda=1), {}))
    assert rows["a"].verdict is Verdict.NEVER
    assert "cuda:0, which this machine does not have" in rows["a"].reason


def test_broken_models_take_nothing() -> None:
    """Their problem is the reason; they stand last."""
    rows = planned((entry("bad", "no such file", ram=900), {"pin": True}), (entry("a", ram=900), {}))
    assert verdicts(rows) == {"a": "fits", "bad": "broken"}
    assert rows["bad"].reason == "no such file"


def test_exactly_full_fits() -> None:
    """The last byte may be used."""
    assert verdicts(planned((entry("a", ram=1000), {}))) == {"a": "fits"}
