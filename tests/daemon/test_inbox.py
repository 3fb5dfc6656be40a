"""The one inbox."""

from pagein.daemon.inbox import Inbox
from pagein.scheduler import Limits, ModelState, Scheduler, SchedulerState
from pagein.scheduler import events as ev


def make_inbox():
    state = SchedulerState({"ram": 10}, [ModelState("a", "medium", {"ram": 4})], Limits())
    return Inbox(Scheduler(state))


class Recorder:
    def __init__(self, then=None):
        self.seen, self.then = [], then

    def on_step(self, event, actions):
        self.seen.append((event, [type(a).__name__ for a in actions]))
        if self.then is not None:
            self.then(event)


def test_events_posted_while_one_is_taken_in_come_after_it():
    """A listener that posts does not recurse into the scheduler: order is the order of posting."""
    inbox = make_inbox()

    def answer(event):
        if isinstance(event, ev.Requested):
            inbox.post(ev.BecameReady("a", {"ram": 4}, 1.0))

    first, second = Recorder(answer), Recorder()
    inbox.add_listener(first)
    inbox.add_listener(second)
    inbox.post(ev.Requested(1, "a"))
    kinds = [type(event).__name__ for event, _ in second.seen]
    assert kinds == ["Requested", "BecameReady"]
    assert first.seen == second.seen
    assert second.seen[1][1] == ["Note", "Grant"]


async def test_a_listener_that_raises_does_not_lose_the_events_behind_it():
    """What is left in the inbox is taken in although a listener failed."""
    import asyncio

    import pytest

    inbox = make_inbox()
    seen = Recorder()

    def fail(event):
        if isinstance(event, ev.Requested):
            inbox.post(ev.Ticked())
            raise RuntimeError("broken listener")

    inbox.add_listener(Recorder(fail))
    inbox.add_listener(seen)
    with pytest.raises(RuntimeError, match="broken listener"):
        inbox.post(ev.Requested(1, "a"))
    await asyncio.sleep(0)
    assert [type(event).__name__ for event, _ in seen.seen] == ["Ticked"]
