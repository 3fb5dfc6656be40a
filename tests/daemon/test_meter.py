"""What is measured, what is learned from it, and what is remembered."""

import asyncio
from dataclasses import replace

import pytest

from pagein.scheduler import events as ev

from .lab import MIB


def known(events, kind):
    return [event for event, _ in events if isinstance(event, kind)]


async def used(lab, name, status=200):
    """One request of a resident model."""
    lease = await lab.acquire(name)
    lab.desk.release(lease, status, 0.1)


async def test_the_sum_of_daemon_and_workers_is_kept_at_its_highest(make_lab):
    """Budget against measured sum: the daemon's own bytes are in it, and what left stays in the highest."""
    lab = make_lab(a={}, b={})
    a, b = await lab.resident("a", 40 * MIB), await lab.resident("b", 30 * MIB)
    await lab.meter.sample()
    assert lab.meter.highest == {"ram": 80 * MIB}
    b.die()
    await lab.settle()
    lab.ram[a.pid] = 45 * MIB
    await lab.meter.sample()
    assert lab.meter.highest == {"ram": 80 * MIB}
    assert lab.meter.last("b") == {}


async def test_the_daemon_s_own_bytes_are_charged(make_lab):
    """Unknown changes nothing."""
    lab = make_lab(a={})
    await lab.meter.sample()
    assert lab.state.ledgers["ram"].held == 10 * MIB
    lab.own = None
    await lab.meter.sample()
    assert lab.state.ledgers["ram"].held == 10 * MIB
    assert lab.meter.daemon_bytes is None


async def test_a_spare_worker_s_bytes_are_the_daemon_s(make_lab):
    """It belongs to no model yet."""
    lab = make_lab(a={})
    lab.spare.pid = 77
    await lab.meter.sample()
    assert lab.meter.daemon_bytes == 20 * MIB
    assert lab.meter.highest == {"ram": 20 * MIB}


async def test_a_load_s_bytes_and_the_machine_s_are_told_together(make_lab):
    """Else what the load took would count as free a second time, and the next one would be let in on it (rule 2)."""
    lab = make_lab(a={"need": 400 * MIB, "pin": True}, b={"need": 400 * MIB})
    lab.available = 600 * MIB
    await lab.meter.sample()
    lab.inbox.post(ev.LoadWanted("a"))
    lab.inbox.post(ev.LoadWanted("b"))
    await lab.settle()
    assert lab.loads("b") == 0
    lab.available = 200 * MIB
    lab.child("a").become_ready(400 * MIB)
    await lab.settle()
    assert lab.model("a").used == {"ram": 400 * MIB}
    assert lab.loads("b") == 0
    assert "the machine has 200 MiB available: other programs use the rest" in lab.model("b").last_reason


async def test_a_peak_above_the_need_is_learned_at_once(make_lab):
    """Also while it loads, also from the high-water mark between two samples."""
    lab = make_lab(a={"need": 100 * MIB})
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()
    pid = lab.child("a").pid
    lab.ram[pid], lab.ram_peak[pid] = 20 * MIB, 300 * MIB
    await lab.meter.sample()
    assert (lab.model("a").need, lab.model("a").need_source) == ({"ram": 315 * MIB}, "measured")
    assert lab.model("a").used == {"ram": 20 * MIB}


async def test_a_peak_below_the_need_is_learned_only_from_an_answered_request(make_lab):
    """A load alone, or a client that left at once, shows too little."""
    lab = make_lab(a={"need": 500 * MIB})
    await lab.resident("a", 100 * MIB)
    await used(lab, "a", status=499)
    await lab.meter.sample()
    assert lab.model("a").need == {"ram": 500 * MIB}
    await used(lab, "a")
    await lab.meter.sample()
    assert lab.model("a").need == {"ram": 108 * MIB}


async def test_a_model_that_leaves_right_after_its_use_is_known_all_the_same(make_lab):
    """No sample sees it between its answer and its end; the guess would be reserved for ever."""
    lab = make_lab(a={"need": 500 * MIB, "priority": "low"})
    child = await lab.resident("a", 100 * MIB)
    await used(lab, "a")
    await lab.settle()
    assert child.ended
    assert (lab.model("a").need, lab.model("a").need_source) == ({"ram": 108 * MIB}, "measured")


async def test_a_smaller_use_does_not_hide_the_peak_of_an_earlier_one(make_lab):
    """What was measured of the worker before is what the next one may take again."""
    lab = make_lab(a={"need": 500 * MIB})
    lab.peaks.remember("key of a", "a", {"ram": 200 * MIB})
    await lab.resident("a", 100 * MIB)
    await used(lab, "a")
    await lab.meter.sample()
    assert (lab.model("a").need, lab.meter.peak("a")) == ({"ram": 210 * MIB}, {"ram": 200 * MIB})


async def test_a_model_that_keeps_within_what_it_is_given_teaches_nothing(make_lab):
    """It takes what it is given: were that learned with head-room, each load would be given more than the last."""
    lab = make_lab(a={"need": 500 * MIB})
    lab.entries["a"] = replace(lab.entries["a"], least=100 * MIB)
    for taken in (520 * MIB, 100 * MIB):
        await lab.resident("a", taken)
        await used(lab, "a")
        await lab.meter.sample()
        assert lab.model("a").need == {"ram": 500 * MIB}
        lab.child("a").die()
        await lab.settle()
    assert known(lab.log, ev.NeedLearned) == []


async def test_a_measured_need_never_shrinks(make_lab):
    """The remembered peak of earlier, larger uses stays."""
    lab = make_lab(a={"need": 500 * MIB})
    lab.model("a").need_source = "measured"
    await lab.resident("a", 100 * MIB)
    await used(lab, "a")
    await lab.meter.sample()
    assert lab.model("a").need == {"ram": 500 * MIB}
    assert known(lab.log, ev.NeedLearned) == []


async def test_a_pool_that_cannot_be_measured_keeps_its_figure(make_lab):
    """GPU bytes are unknown in many containers: the next load still reserves them."""
    lab = make_lab(a={})
    lab.model("a").need = {"ram": 50 * MIB, "cuda:0": 900 * MIB}
    pid_of = lambda: lab.child("a").pid  # noqa: E731
    lab.model("a").need.pop("cuda:0")
    await lab.resident("a", 40 * MIB)
    lab.model("a").need["cuda:0"] = 900 * MIB
    lab.ram[pid_of()] = 100 * MIB
    await lab.meter.sample()
    assert lab.model("a").need == {"ram": 108 * MIB, "cuda:0": 900 * MIB}
    lab.gpu[pid_of()] = {"cuda:0": 200 * MIB}
    lab.ram[pid_of()] = 200 * MIB
    await lab.meter.sample()
    assert lab.model("a").need == {"ram": 210 * MIB, "cuda:0": 900 * MIB}


async def test_small_growth_is_not_news_at_every_sample(make_lab):
    """A need that was just learned has head-room: a few pages more say nothing new."""
    lab = make_lab(a={"need": 50 * MIB})
    child = await lab.resident("a", 100 * MIB)
    for extra in range(1, 10):
        lab.ram[child.pid] = 100 * MIB + extra * 4096
        await lab.meter.sample()
    assert len(known(lab.log, ev.NeedLearned)) == 1


async def test_what_a_model_took_is_remembered_for_the_next_start(make_lab):
    """The peak of a use; the peak of a load alone as a lower bound; also of one that was ended before it served."""
    lab = make_lab(used={}, loaded={}, left={}, liar={"need": 50 * MIB})
    for name in ("used", "loaded", "left"):
        await lab.resident(name, 80 * MIB)
    await used(lab, "used")
    await used(lab, "left", status=499)
    lab.inbox.post(ev.LoadWanted("liar"))
    await lab.settle()
    lab.ram[lab.child("liar").pid] = 300 * MIB
    await lab.meter.sample()
    names = ("used", "loaded", "left", "liar")
    for name in names:
        await lab.desk.unload(name)
    seen = [lab.peaks.peak(f"key of {name}") for name in names]
    assert [row.used["ram"] // MIB for row in seen] == [80, 80, 80, 300]
    assert [row.in_use for row in seen] == [True, False, False, False]


async def test_closing_remembers_what_still_runs(make_lab):
    """A shutdown loses no measurement."""
    lab = make_lab(a={})
    await lab.resident("a", 80 * MIB)
    lab.meter.close()
    assert lab.peaks.peak("key of a").used == {"ram": 80 * MIB}
    assert lab.meter.peak("a") == {"ram": 80 * MIB}


async def test_a_reading_of_a_process_that_was_replaced_is_dropped(make_lab, monkeypatch):
    """A sample that was taken before a model came back says nothing about its new worker."""
    lab = make_lab(a={})
    old = await lab.resident("a", 80 * MIB)
    gate, real = asyncio.Event(), asyncio.to_thread

    async def slowly(work, *arguments):
        result = await real(work, *arguments)
        await gate.wait()
        return result

    monkeypatch.setattr(asyncio, "to_thread", slowly)
    sampling = asyncio.ensure_future(lab.meter.sample())
    await lab.settle()
    monkeypatch.setattr(asyncio, "to_thread", real)
    lab.meter.forget("a")
    lab.meter.watch("a", old.pid + 500)
    gate.set()
    await sampling
    assert lab.meter.last("a") == {}


@pytest.mark.parametrize("act", ["measure_load", "measure_machine"])
async def test_a_probe_that_fails_holds_nobody_up(make_lab, monkeypatch, caplog, act):
    """A load becomes ready and bytes become free although nothing could be read."""
    lab = make_lab(a={})
    monkeypatch.setattr(lab, "read_machine", lambda: 1 / 0)
    await lab.resident("a")
    await lab.desk.unload("a")
    await lab.resident("a")
    for record in caplog.records:
        record.expected = True
    assert "failed" in caplog.text


async def test_time_passes_also_while_a_sample_is_stuck(make_lab, monkeypatch, caplog):
    """A read that hangs in the kernel must not end the bounds on waits; one that fails must not end the watch."""
    lab = make_lab(a={})
    lab.meter._every = 0.0
    samples = iter([ZeroDivisionError("odd"), None])

    async def sample():
        fault = next(samples)
        if fault is not None:
            raise fault
        await asyncio.Event().wait()

    monkeypatch.setattr(lab.meter, "sample", sample)
    running = asyncio.ensure_future(lab.meter.run())
    while len(known(lab.log, ev.Ticked)) < 20:
        await asyncio.sleep(0)
    assert next(samples, "both were asked for") == "both were asked for"
    running.cancel()
    await asyncio.wait([running])
    for record in caplog.records:
        record.expected = True
