"""Host memory beside an accelerator: caps, slots, page-locking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pagein.kv.tiers.host import HostTier


class Locks:
    """Notes what is page-locked; refuses where it is told to."""

    def __init__(self, refuse: bool = False) -> None:
        self.held, self.refuse = 0, refuse

    def __call__(self, flat):
        if self.refuse:
            return None
        self.held += flat.numel()
        return lambda: self._unlock(flat.numel())

    def _unlock(self, size: int) -> None:
        self.held -= size


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([4096, 8192, 12288])), max_size=60))
def test_cap_is_never_passed(wishes: list[tuple[bool, int]]):
    """Whatever is put and dropped: what the machine gave stays within the cap, and contents stay apart."""
    cap, locks = 100_000, Locks()
    host = HostTier(cap, locks)
    held: dict[int, tuple[int, int]] = {}
    for number, (put, size) in enumerate(wishes):
        if put or not held:
            handle = host.put(size)
            if handle is not None:
                host.view(handle).fill_(number % 251)
                held[handle] = (size, number % 251)
        else:
            host.drop(held.popitem()[0])
        assert host.taken <= cap
        assert host.used == sum(size for size, _ in held.values())
        assert locks.held == host.pinned == host.taken
    for handle, (size, mark) in held.items():
        assert host.view(handle).numel() == size
        assert bool((host.view(handle) == mark).all())
    for handle in list(held):
        host.drop(handle)
    assert (host.used, host.taken, host.pinned, len(host)) == (0, 0, 0, 0)


def test_too_large():
    """Scenario 9: what is larger than the cap takes nothing."""
    host = HostTier(10_000)
    assert host.put(20_000) is None
    assert (host.taken, host.peak) == (0, 0)


def test_locked_share():
    """No more is page-locked than allowed; what is beyond is pageable."""
    locks = Locks()
    host = HostTier(64_000, locks, pinned_cap=8192)
    handles = [host.put(4096) for _ in range(4)]
    assert None not in handles
    assert host.pinned == locks.held == 8192
    host.close()
    assert locks.held == 0


def test_refused_lock():
    """Where the system refuses to lock pages, memory is pageable and all works."""
    host = HostTier(64_000, Locks(refuse=True))
    handle = host.put(4096)
    assert handle is not None
    assert host.pinned == 0
    host.close()
