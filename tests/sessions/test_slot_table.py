"""Routing prompts to slots."""

from __future__ import annotations

import pytest

from pagein.sessions.slot_table import SlotTable

SYSTEM = list(range(100, 124))
SEA, BREAD = [*SYSTEM, *range(1000, 1200)], [*SYSTEM, *range(2000, 2012)]


@pytest.fixture
def table():
    """Two slots, one of which holds a conversation."""
    table = SlotTable(2)
    table.begins(1, SEA, "a")
    return table


def test_a_conversation_that_goes_on_stays(table):
    """Nothing is lost there, and all of it is reused."""
    route = table.route([*SEA, 1, 2], "a")
    assert (route.slot, route.common, route.displaced, route.foreign) == (1, len(SEA), None, False)


def test_a_shared_system_prompt_displaces_nobody(table):
    """An empty slot costs less than 200 tokens of somebody else."""
    route = table.route(BREAD, "a")
    assert (route.slot, route.common, route.displaced) == (0, 0, None)


def test_a_long_shared_prefix_is_worth_a_short_end(table):
    """Another question about the same long text: the end that goes is told, so that it can be saved."""
    route = table.route([*SEA[:-10], 7, 7, 7], "a")
    assert (route.slot, route.common) == (1, len(SEA) - 10)
    assert route.displaced is table.held(1)


def test_the_longest_unused_leaves(table):
    """Where all slots hold something unlike."""
    table.begins(0, BREAD, "a")
    table.begins(1, BREAD, "a")
    assert table.route([5, 6], "a").slot == 0


def test_what_is_saved_may_go_first(table):
    """It costs a restore, not a recompute."""
    table.begins(0, BREAD, "a")
    table.saved(1, [*SEA, 9])
    route = table.route([5, 6], "a")
    assert (route.slot, route.displaced) == (1, None)
    assert table.held(1).tokens == len(SEA) + 1


def test_another_tenants_prefix_is_not_reused(table):
    """The same prompt under another key: another slot, or this one erased."""
    assert table.route(SEA, "b").slot == 0
    only = table.route(SEA, "b", busy=[0])
    assert (only.slot, only.common, only.foreign) == (1, 0, True)
    assert only.displaced is table.held(1)


def test_busy_slots_are_left_alone(table):
    """Even where the prompt would go on there."""
    assert table.route(SEA, "a", busy=[1]).slot == 0
    assert table.route(SEA, "a", busy=[0, 1]) is None


def test_an_emptied_slot_holds_nothing(table):
    """After an erase, or a restore that failed."""
    table.emptied(1)
    assert table.held(1) is None
    table.saved(1, SEA)
    assert table.held(1) is None
    table.restored(1, SEA, "a")
    assert table.held(1).saved
