"""What a model gets that can live with less than all of it."""

from __future__ import annotations

from typing import Any

from pagein.catalog.allot import DAEMON_BYTES, allot
from pagein.catalog.model import ModelEntry, Need, NeedSource
from pagein.config.schema import Model

GIB = 1024**3


def entry(name: str, whole: int, least: int | None, declared: int | None = None) -> ModelEntry:
    """A resolved model."""
    need = Need({"ram": declared or whole}, NeedSource.DECLARED if declared else NeedSource.ESTIMATED, "test")
    return ModelEntry(name, "transformers", "1", frozenset(), None, "cpu", need, need, name, least=least)


def given(budget: int, *entries: ModelEntry, **settings: dict[str, Any]) -> dict[str, int]:
    """Bytes that each of the models gets."""
    models = {e.name: Model(model="/m", **settings.get(e.name, {})) for e in entries}
    found = allot({e.name: e for e in entries}, models, {"ram": budget + DAEMON_BYTES})
    return {name: one.need.bytes["ram"] for name, one in found.items()}


def test_what_fits_gets_all_of_it() -> None:
    """Then nothing streams."""
    assert given(16 * GIB, entry("a", 15 * GIB, GIB)) == {"a": 15 * GIB}


def test_what_does_not_fit_gets_half_of_what_there_is() -> None:
    """So that others fit beside it; or the least that it can do with, where that is more."""
    assert given(8 * GIB, entry("a", 15 * GIB, GIB)) == {"a": 4 * GIB}
    assert given(8 * GIB, entry("a", 15 * GIB, 5 * GIB)) == {"a": 5 * GIB}


def test_what_can_never_fit_says_what_it_needs_at_least() -> None:
    """The refusal then has that number and the budget's."""
    assert given(2 * GIB, entry("a", 15 * GIB, 3 * GIB)) == {"a": 3 * GIB}


def test_a_declared_memory_is_taken_as_it_is() -> None:
    """Whatever the model's size."""
    assert given(8 * GIB, entry("a", 15 * GIB, GIB, 3 * GIB), a={"memory": "3GiB"}) == {"a": 3 * GIB}


def test_room_that_others_keep_for_ever_is_not_given() -> None:
    """Pinned models and those of high priority leave the rest."""
    beside = entry("kept", 4 * GIB, None)
    assert given(8 * GIB, entry("a", 15 * GIB, GIB), beside, kept={"pin": True})["a"] == 2 * GIB
    assert given(8 * GIB, entry("a", 15 * GIB, GIB), beside)["a"] == 4 * GIB


def test_others_are_left_alone() -> None:
    """A model that takes what it takes keeps its need, and so does one that cannot be served."""
    plain = entry("plain", 15 * GIB, None)
    assert given(8 * GIB, plain) == {"plain": 15 * GIB}


def test_asking_twice_changes_nothing() -> None:
    """A reload decides from the whole size again, not from what was given before."""
    first = entry("a", 15 * GIB, GIB)
    models = {"a": Model(model="/m")}
    once = allot({"a": first}, models, {"ram": 8 * GIB})
    assert allot(once, models, {"ram": 8 * GIB}) == once
    assert allot(once, models, {"ram": 32 * GIB})["a"].need.bytes == {"ram": 15 * GIB}
