"""Decisions are kept, streamed and bounded."""

import asyncio
from pathlib import Path

from pagein.daemon.journal import KEPT, SUBSCRIBER_BACKLOG, Journal
from pagein.errors import LoadFailed, QueueFull
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Grant, Load, Note, Refuse, Stop


def test_what_was_decided_can_be_asked_for_in_order():
    """One model's decisions, or all, oldest first, with the numbers of a refusal."""
    journal = Journal()
    journal.on_step(ev.Ticked(), [Load("a", {"ram": 4}, "fits"), Stop("b", "idle", "a")])
    journal.on_step(ev.Ticked(), [Refuse(7, "a", QueueFull("a", 2, 2))])
    assert [(d.kind, d.model) for d in journal.last(None, 10)] == [("load", "a"), ("stop", "b"), ("refuse", "a")]
    refused = journal.last("a", 1)[0]
    assert (refused.data["code"], refused.data["limit"], refused.request_id) == ("queue_full", 2, 7)
    assert journal.last("b", 10)[0].data == {"evicted_for": "a"}


def test_traffic_does_not_push_out_loads_and_evictions():
    """Thousands of grants leave the reason of the last load readable."""
    journal = Journal()
    journal.on_step(ev.Ticked(), [Load("a", {"ram": 4}, "fits")])
    for i in range(3 * KEPT["traffic"]):
        journal.on_step(ev.Ticked(), [Grant(i, "a", "resident")])
    assert "load" in {d.kind for d in journal.last("a", 10_000)}
    assert len(journal.last("a", 10_000)) == KEPT["traffic"] + 1


async def test_a_slow_subscriber_loses_the_oldest_and_nobody_waits_for_it():
    """Memory is bounded by the backlog; the stream ends with the journal."""
    journal = Journal()
    stream = journal.subscribe()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for i in range(SUBSCRIBER_BACKLOG + 10):
        journal.record("note", "a", str(i))
    journal.close()
    seen = [(await first).reason] + [d.reason async for d in stream]
    assert seen[-1] == str(SUBSCRIBER_BACKLOG + 9)
    assert len(seen) <= SUBSCRIBER_BACKLOG


def test_refusals_do_not_push_out_loads_and_evictions():
    """A client that hammers a full queue leaves the reason of the last load readable, and of its own last refusals."""
    journal = Journal()
    journal.on_step(ev.Ticked(), [Load("a", {"ram": 4}, "fits")])
    for i in range(3 * KEPT["refusals"]):
        journal.on_step(ev.Ticked(), [Refuse(i, "a", QueueFull("a", 2, 2)), Grant(i, "a", "resident")])
    kinds = [d.kind for d in journal.last("a", 10_000)]
    assert (kinds[0], kinds.count("refuse"), kinds.count("grant")) == ("load", KEPT["refusals"], KEPT["traffic"])


def test_what_happened_stands_before_what_was_decided_because_of_it():
    """A worker's end, then the load that its memory makes possible; each is told once, with the scheduler's reason."""
    journal = Journal()
    journal.on_step(ev.WorkerExited("a", QueueFull("a", 2, 2)), [Note("a", "it died; next try in 1.0 s")])
    journal.on_step(ev.Freed("a"), [Load("b", {"ram": 4}, "fits")])
    journal.on_step(ev.BecameReady("b", {"ram": 3}, 1.25), [Note("b", "ready after 1.2 s"), Grant(1, "b", "resident")])
    journal.on_step(ev.BecameReady("b", {"ram": 3}, 1.25), [])  # it was told to leave before
    assert [(d.kind, d.model) for d in journal.last(None, 10)] == [
        ("failed", "a"),
        ("freed", "a"),
        ("load", "b"),
        ("ready", "b"),
        ("grant", "b"),
    ]
    ready = journal.last("b", 2)[0]
    assert (ready.reason, ready.data) == ("ready after 1.2 s", {"used": {"ram": 3}})
    assert journal.last("a", 2)[0].reason == "it died; next try in 1.0 s"
    assert journal.last(None, 0) == []


async def test_a_subscription_that_comes_after_the_end_ends_at_once(bounded):
    """A client of the event stream does not hold up the shutdown."""
    journal = Journal()
    journal.close()
    assert [d async for d in journal.subscribe()] == []


async def test_a_subscriber_who_leaves_is_forgotten():
    """No queue is filled for somebody who is gone."""
    journal = Journal()
    stream = journal.subscribe()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert len(journal._subscribers) == 1
    first.cancel()
    await asyncio.wait([first])
    await stream.aclose()
    assert journal._subscribers == set()


def test_a_refusal_does_not_repeat_the_workers_last_lines():
    """They stand with the failure itself; a client that hammers a broken model must not fill the memory with them."""
    journal = Journal()
    error = LoadFailed("model 'a' failed\nlast output:\n  a long line", model="a", log=["a long line"])
    journal.on_step(ev.Ticked(), [Refuse(1, "a", error)])
    (refused,) = journal.last("a", 10)
    assert refused.reason == "model 'a' failed"
    assert refused.data == {"code": "load_failed", "model": "a"}


def test_what_is_asked_for_is_what_was_recorded():
    """Every field comes back, also text that is no text; what JSON cannot say, among an error's details, as words."""
    journal = Journal()
    journal.record(
        "load", "a\udcff", "fits \u2026", 7, {"allowance": {"ram": 4}, "removed": False, "evicted_for": None}
    )
    journal.record("deny", None, "no room", data={"folder": Path("models")})
    load, deny = journal.last(None, 10)
    assert (load.seq, load.kind, load.model, load.reason, load.request_id) == (1, "load", "a\udcff", "fits \u2026", 7)
    assert load.data == {"allowance": {"ram": 4}, "removed": False, "evicted_for": None}
    assert (deny.model, deny.request_id, deny.data) == (None, None, {"folder": "models"})
    assert load.time <= deny.time
