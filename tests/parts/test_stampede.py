"""Many threads, several tasks, room for one part, and an evictor at full speed: nothing wrong, nothing raised."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from pagein.parts.residency import Residency
from tests.parts.served import HEADS, Net, ids, net, split_net

pytestmark = pytest.mark.torch
SEEDS = range(8)


class Crowd:
    """Threads that call at once and compare every answer with the whole model's."""

    def __init__(self, whole, model, threads: int, calls: int) -> None:
        self.model, self.calls = model, calls
        with torch.no_grad():
            self.want = {(task, seed): whole(ids(seed), task) for task in HEADS for seed in SEEDS}
        self.inputs = {seed: ids(seed) for seed in SEEDS}
        self.told: Counter[str] = Counter()
        self.evictions = 0
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.call, args=(number,)) for number in range(threads)]

    def call(self, number: int) -> None:
        choose = random.Random(number)
        with torch.no_grad():
            for _ in range(self.calls):
                task, seed = choose.choice(HEADS), choose.choice(SEEDS)
                try:
                    answer = self.model(self.inputs[seed], task=task)
                except Exception as error:
                    self.told[f"{type(error).__name__}: {error}"] += 1
                else:
                    self.told["right" if torch.equal(answer, self.want[task, seed]) else "wrong"] += 1

    def evict(self) -> None:
        while not self.over.is_set():
            self.evictions += sum(self.model.pagein.unload(task) for task in HEADS)
            os.sched_yield()  # the lock is not fair: who never pauses would have it nearly always

    def run(self) -> Counter[str]:
        evictor = threading.Thread(target=self.evict)
        for thread in [evictor, *self.threads]:
            thread.start()
        for thread in self.threads:
            thread.join()
        self.over.set()
        evictor.join()
        return self.told


def room_for_one(plan) -> int:
    """Bytes of the backbone and the largest head."""
    sizes = {name: part.file("stored").nbytes for name, part in plan.parts.items()}
    return sizes.pop("backbone") + max(sizes.values())


def test_nothing_is_wrong_and_nothing_raised(tmp_path, load):
    """16 threads × 4 tasks with room for one part, against an evictor: every answer is right (scenario 2)."""
    whole = net()
    model = load(tmp_path, room_for_one(split_net(tmp_path, whole)), build=Net)
    crowd = Crowd(whole, model, 16, 150)
    assert crowd.run() == {"right": 16 * 150}
    report = model.pagein.report()
    heads = [one for one in report.parts if one.part != "backbone"]
    resident = sum(one.state == "hot" for one in heads)
    assert sum(one.loads for one in heads) == sum(one.evictions for one in heads) + resident
    assert sum(one.loads for one in heads) > 50
    assert {one.leases for one in report.parts} == {0}
    assert report.owned <= report.allowance


class LockOnly(Residency):
    """What a lock against double loading does alone: the lease ends as soon as the part is there."""

    def acquire(self, *arguments, **options):
        groups = super().acquire(*arguments, **options)
        super().release(groups)
        return groups

    def release(self, groups) -> None:
        pass


def test_a_lock_alone_is_not_enough(tmp_path, load):
    """The same crowd on a runtime whose leases do not span the call fails: so the test above can fail."""
    whole = net()
    model = load(tmp_path, room_for_one(split_net(tmp_path, whole)), build=Net)
    model.pagein.residency.__class__ = LockOnly
    told = Crowd(whole, model, 8, 60).run()
    assert sum(count for what, count in told.items() if what != "right") > 0
    model.pagein.residency.__class__ = Residency


def test_a_stampede_reads_once(tmp_path, load):
    """32 threads make the first call of a cold task together: one load, and all have the right answer (scenario 1)."""
    whole = net()
    split_net(tmp_path, whole)
    model = load(tmp_path, build=Net)
    ready = threading.Barrier(32)
    answers = []

    @torch.no_grad()
    def call() -> None:
        ready.wait()
        answers.append(model(ids(), task="attend"))

    threads = [threading.Thread(target=call) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        want = whole(ids(), "attend")
    assert len(answers) == 32
    assert all(torch.equal(one, want) for one in answers)
    report = {one.part: one for one in model.pagein.report().parts}
    assert report["attend"].loads == 1
    assert report["attend"].bytes <= 1.1 * report["attend"].file_bytes
