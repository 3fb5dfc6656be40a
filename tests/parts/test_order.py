"""On a device a part's memory goes only after the kernels that read it; a lock that finalisers may use."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from pagein.parts.deferring import DeferringLock
from pagein.parts.order import OnDevice
from tests.parts.served import Net, ids, net, split_net
from tests.weights.fake_cuda import Cuda

pytestmark = pytest.mark.torch


def test_memory_goes_after_the_last_kernel(tmp_path, load):
    """The end of each use is recorded on its stream; before the part leaves the host waits for the last of each."""
    split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    cuda = Cuda()
    model.pagein.residency.order = OnDevice(torch.device("cpu"), cuda)
    model(ids(), task="tag")
    model(ids(), task="tag")
    landed, *uses = [name for who, what, name in cuda.log if what == "records"]
    assert cuda.log[1] == ("host", "waits", landed)
    cuda.log.clear()
    assert model.pagein.unload("tag")
    assert cuda.log == [("host", "waits", uses[-1])]
    cuda.log.clear()
    model.pagein.load("tag")
    model.pagein.unload("tag")
    assert ("host", "waits", uses[-1]) not in cuda.log


def test_what_is_deferred_runs_under_the_lock():
    """What is asked for while the lock is held runs as it is let go, and at once where it is free."""
    lock, done = DeferringLock(), []
    lock.soon(lambda: done.append(lock.acquire(blocking=False)))
    assert done == [False]
    with lock:
        lock.soon(lambda: done.append("later"))
        assert done == [False]
    assert done == [False, "later"]


def test_a_finaliser_under_the_lock_does_not_hang():
    """An object that is collected while its own thread holds the lock gives back through it all the same."""
    lock, done = DeferringLock(), []

    class Held:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            lock.soon(lambda: done.append("given back"))

    Held()
    with lock:
        gc.collect()
        assert done == []
    assert done == ["given back"]


def test_nothing_deferred_is_lost_among_threads():
    """Acts of many threads, asked for while others take and let go, all run, one at a time."""
    lock, count = DeferringLock(), [0]

    def add() -> None:
        count[0] += 1

    def work() -> None:
        for _ in range(500):
            lock.soon(add)
            with lock:
                add()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [8 * 1000]


def test_waiting_lets_go_of_it():
    """A condition on the lock works as on any other: who waits lets others in."""
    lock = DeferringLock()
    changed = threading.Condition(lock)
    told = []

    def wait() -> None:
        with lock:
            told.append("waits")
            changed.notify_all()
            changed.wait_for(lambda: "go" in told)
            told.append("gone")

    thread = threading.Thread(target=wait)
    with lock:
        thread.start()
        changed.wait_for(lambda: "waits" in told)
        told.append("go")
        changed.notify_all()
    thread.join()
    assert told == ["waits", "go", "gone"]
