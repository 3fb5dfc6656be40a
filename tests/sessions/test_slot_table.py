"""Routing prompts to slots."""

from __future__ import annotations

import pytest

from pagein.history import TurnOf
from pagein.sessions.slot_table import SlotTable

SYSTEM = list(range(100, 124))
SEA, BREAD = [*SYSTEM, *range(1000, 1200)], [*SYSTEM, *range(2000, 2012)]


def holds(table, slot, tokens):
    """A turn of a client that named no conversation was answered there."""
    table.begins(slot, tokens, "a", None, 0)
    table.computed(slot)


@pytest.fixture
def table():
    """Two slots, one of which holds a conversation."""
    table = SlotTable(2)
    holds(table, 1, SEA)
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
    holds(table, 0, BREAD)
    holds(table, 1, BREAD)
    assert table.route([5, 6], "a").slot == 0


def test_what_is_saved_may_go_first(table):
    """It costs a restore, not a recompute."""
    holds(table, 0, BREAD)
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
    table.restored(1, SEA, "a", None)
    assert table.held(1).saved


def test_what_was_to_be_computed_is_not_there_yet(table):
    """A client that left amid the prompt: what was there before is sure, the rest is only likely."""
    table.begins(1, [*SEA, *range(300)], "a", None, len(SEA))
    route = table.route([*SEA, *range(300), 1], "a")
    assert (route.slot, route.common, route.likely, route.displaced) == (1, len(SEA), len(SEA) + 300, None)
    table.computed(1)
    assert table.route_to(1, [*SEA, *range(300), 1], "a").common == len(SEA) + 300


def test_a_save_tells_how_far_the_engine_got(table):
    """It lists what is there, which is then sure."""
    table.begins(1, [*SEA, *range(300)], "a", None, 0)
    table.saved(1, [*SEA, 0, 1])
    assert table.route([*SEA, *range(300)], "a").common == len(SEA) + 2
    assert table.held(1).sure is None


def test_what_left_the_disk_counts_as_lost(table):
    """It is no longer free to displace; a turn that goes on there is saved again."""
    holds(table, 0, BREAD)
    table.saved(1, SEA)
    table.left(1)
    assert (table.held(1).saved, table.held(1).left) == (False, True)
    assert table.route_to(1, [5, 6], "a").displaced is table.held(1)
    holds(table, 1, [*SEA, 1])
    assert not table.held(1).left


def test_a_slot_knows_whose_turn_it_was(table):
    """Also after its save; what was restored is of the turn that it was saved in."""
    one, two = TurnOf("conv_1", 1.0), TurnOf("conv_2", 2.0)
    table.begins(1, SEA, "a", one, 0)
    table.saved(1, SEA)
    assert table.held(1).turn == one
    table.restored(1, SEA, "a", two)
    assert table.held(1).turn == two
    table.begins(1, SEA, "a", None, len(SEA))
    assert table.held(1).turn is None


def test_slots_of_strangers_are_erased_before_their_use():
    """Whatever the prompt; after that they are like any other."""
    table = SlotTable(2)
    table.are_foreign()
    route = table.route(SEA, "a")
    assert (route.foreign, route.common) == (True, 0)
    holds(table, route.slot, SEA)
    assert not table.route(SEA, "a").foreign
    assert table.route(SEA, "a", busy=[route.slot]).foreign
