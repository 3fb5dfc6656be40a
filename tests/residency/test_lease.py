"""A lease ends exactly once."""

import pytest

from pagein.residency.lease import Leases


def test_a_lease_ends_once_however_often_it_is_given_back():
    """Giving back twice does no harm and is told apart."""
    leases = Leases()
    leases.take(1, "chat")
    leases.take(2, "chat")
    assert leases.count("chat") == 2
    assert leases.give_back(1) == "chat"
    assert leases.give_back(1) is None
    assert leases.count("chat") == 1
    assert len(leases) == 1


def test_an_id_cannot_be_taken_twice():
    """A lease id names one lease for ever."""
    leases = Leases()
    leases.take(1, "chat")
    with pytest.raises(AssertionError, match="taken twice"):
        leases.take(1, "embed")
