"""Budgets from what the machine has and what was configured."""

import pytest

from pagein.errors import ConfigError
from pagein.memory.budget import less_mapped, resolve_budgets
from pagein.memory.snapshot import MachineSnapshot, PoolReading

GIB = 1024**3


def machine(unified: bool = False, **totals: int) -> MachineSnapshot:
    """A machine with these pools; `cuda_0` stands for `cuda:0`."""
    pools = {
        name.replace("_", ":"): PoolReading(name.replace("_", ":"), total, total, "physical memory")
        for name, total in totals.items()
    }
    return MachineSnapshot(pools=pools, unified=unified)


def test_a_pool_that_is_not_named_gets_ninety_percent():
    """Unset means 90 % of what there is, rounded down, and the source says so."""
    budget = resolve_budgets(machine(ram=10 * GIB + 1), {})["ram"]
    assert budget.bytes == 9 * GIB
    assert budget.source == "90 % of physical memory"


def test_a_configured_size_is_taken_as_it_is():
    """A size in bytes is the budget, to the byte."""
    budget = resolve_budgets(machine(ram=10 * GIB), {"ram": 700 * 1024**2})["ram"]
    assert (budget.bytes, budget.source) == (700 * 1024**2, "configured 700 MiB")


def test_a_share_counts_from_what_limits_us():
    """A share is one of the total that binds, and names it."""
    pool = PoolReading("ram", 4 * GIB, None, "cgroup /a memory.max")
    budget = resolve_budgets(MachineSnapshot(pools={"ram": pool}), {"ram": 0.5})["ram"]
    assert (budget.bytes, budget.source) == (2 * GIB, "configured 50 % of cgroup /a memory.max")


def test_all_of_a_pool_may_be_configured():
    """Exactly what there is, as size or as share, is no error."""
    assert resolve_budgets(machine(ram=GIB), {"ram": GIB})["ram"].bytes == GIB
    assert resolve_budgets(machine(ram=GIB), {"ram": 1.0})["ram"].bytes == GIB


def test_each_pool_has_its_own_budget():
    """A wish for one pool leaves the others at the default."""
    budgets = resolve_budgets(machine(ram=10 * GIB, cuda_0=20 * GIB), {"cuda:0": 0.25})
    assert {name: budget.bytes for name, budget in budgets.items()} == {"ram": 9 * GIB, "cuda:0": 5 * GIB}


def test_more_than_there_is_is_an_error_with_both_numbers():
    """A size above the pool is refused with what was asked and what is there."""
    with pytest.raises(ConfigError, match=r"budget\.ram: 64\.0 GiB .* physical memory has 32\.0 GiB"):
        resolve_budgets(machine(ram=32 * GIB), {"ram": 64 * GIB})


def test_numbers_that_look_alike_are_told_in_bytes():
    """Two sizes that print alike are told to the byte."""
    with pytest.raises(ConfigError, match=f"{32 * GIB + 1} bytes is more than .* {32 * GIB} bytes"):
        resolve_budgets(machine(ram=32 * GIB), {"ram": 32 * GIB + 1})


def test_an_unknown_pool_is_an_error_that_names_the_known_ones():
    """A pool that is not here is refused, and the message lists those that are."""
    with pytest.raises(ConfigError, match=r"budget\.cuda:1: .* it has ram, cuda:0$"):
        resolve_budgets(machine(ram=GIB, cuda_0=GIB), {"cuda:1": GIB})


def test_a_gpu_of_a_unified_machine_has_no_budget_of_its_own():
    """Where CPU and GPU share memory, a GPU budget is refused with the reason."""
    with pytest.raises(ConfigError, match="its GPU shares this memory"):
        resolve_budgets(machine(unified=True, ram=GIB), {"cuda:0": GIB})


def test_all_faults_come_at_once():
    """Every wrong pool has its line."""
    with pytest.raises(ConfigError) as caught:
        resolve_budgets(machine(ram=GIB), {"ram": 2 * GIB, "cuda:7": 5})
    assert [line.split(": ")[0] for line in caught.value.message.splitlines()] == ["budget.cuda:7", "budget.ram"]


@pytest.mark.parametrize("wish", [0, 0.0, -0.5, 1.5])
def test_nonsense_is_refused(wish):
    """No bytes, no share, and more than all of it are errors, whoever read the file."""
    with pytest.raises(ConfigError, match=r"^budget\.ram: "):
        resolve_budgets(machine(ram=GIB), {"ram": wish})


def test_mapped_weights_are_not_available():
    """Pages of files that our workers use count as taken, and nothing else of the machine changes."""
    before = machine(ram=10 * GIB, cuda_0=20 * GIB)
    after = less_mapped(before, 4 * GIB)
    assert after.pools["ram"] == PoolReading("ram", 10 * GIB, 6 * GIB, "physical memory")
    assert after.pools["cuda:0"] == before.pools["cuda:0"]
    assert before.pools["ram"].available == 10 * GIB


def test_more_mapped_than_available_leaves_nothing():
    """Never below zero: the two figures are read at different moments."""
    assert less_mapped(machine(ram=GIB), 2 * GIB).pools["ram"].available == 0


def test_an_unknown_stays_unknown_whatever_is_mapped():
    """No figure is made up from what is mapped alone."""
    pool = PoolReading("ram", 4 * GIB, None, "cgroup /a memory.max")
    unknown = MachineSnapshot(pools={"ram": pool})
    assert less_mapped(unknown, GIB) == unknown
    assert less_mapped(MachineSnapshot(pools={}), GIB).pools == {}
