"""The ledger owns every byte of a pool."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagein.residency.ledger import Holding, Ledger, Totals


def test_a_load_moves_through_the_columns():
    """Bytes go free → reserved → resident → releasing → free, and the sum never changes."""
    ledger = Ledger("ram", 100)
    ledger.reserve("a", 60)
    assert ledger.totals() == Totals(40, 60, 0, 0, 0)
    ledger.confirm("a")
    assert ledger.totals() == Totals(40, 0, 60, 0, 0)
    ledger.begin_release("a")
    assert ledger.totals() == Totals(40, 0, 0, 60, 0)
    assert ledger.finish_release("a") == 60
    assert ledger.totals() == Totals(100, 0, 0, 0, 0)


def test_more_than_free_cannot_be_reserved():
    """A reservation above what is free is a broken invariant; the question says no first."""
    ledger = Ledger("ram", 100)
    ledger.reserve("a", 60)
    assert not ledger.can_reserve(41)
    with pytest.raises(AssertionError, match="41 bytes for b, 40 free"):
        ledger.reserve("b", 41)


def test_a_holder_cannot_reserve_twice():
    """One holder has one entry."""
    ledger = Ledger("ram", 100)
    ledger.reserve("a", 10)
    with pytest.raises(AssertionError, match="holds bytes already"):
        ledger.reserve("a", 10)


def test_what_was_measured_is_recorded_even_beyond_the_budget():
    """A liar shows as overdraft: nothing is free, and the excess is a number."""
    ledger = Ledger("ram", 100)
    ledger.reserve("liar", 50)
    ledger.confirm("liar")
    ledger.resize("liar", 130)
    assert ledger.totals() == Totals(0, 0, 130, 0, 30)
    ledger.check()


class LedgerMachine(RuleBasedStateMachine):
    """Random legal acts keep the ledger's sum."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger("ram", 1000)
        self.model: dict[str, tuple[Holding, int]] = {}

    @rule(name=st.sampled_from("abcdef"), count=st.integers(0, 1200))
    def reserve(self, name, count):
        if name not in self.model and self.ledger.can_reserve(count):
            self.ledger.reserve(name, count)
            self.model[name] = (Holding.RESERVED, count)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 1500))
    def advance(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.model)))
        column, held = self.model[name]
        if column is Holding.RESERVED:
            self.ledger.confirm(name)
            self.model[name] = (Holding.RESIDENT, held)
        elif column is Holding.RESIDENT and count % 2:
            self.ledger.resize(name, count)
            self.model[name] = (column, count)
        elif column is Holding.RESIDENT:
            self.ledger.begin_release(name)
            self.model[name] = (Holding.RELEASING, held)
        else:
            assert self.ledger.finish_release(name) == held
            del self.model[name]

    @invariant()
    def sums(self):
        self.ledger.check()
        held = sum(count for _, count in self.model.values())
        assert self.ledger.held == held
        assert self.ledger.free == max(0, 1000 - held)
        for name, (column, count) in self.model.items():
            assert self.ledger.column_of(name) is column
            assert self.ledger.bytes_of(name) == count


TestLedgerMachine = LedgerMachine.TestCase
