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


def test_a_listener_that_raises_takes_nothing_from_the_others(caplog):
    """A fault in one listener is logged; the others hear of the step, and the events behind it are taken in."""
    inbox = make_inbox()
    seen = Recorder()

    def fail(event):
        if isinstance(event, ev.Requested):
            inbox.post(ev.Ticked())
            raise RuntimeError("broken listener")

    inbox.add_listener(Recorder(fail))
    inbox.add_listener(seen)
    inbox.post(ev.Requested(1, "a"))
    assert [type(event).__name__ for event, _ in seen.seen] == ["Requested", "Ticked"]
    assert "Load" in seen.seen[0][1]
    assert "broken listener" in caplog.text


def test_an_event_that_the_scheduler_fails_on_does_not_end_the_inbox(caplog):
    """The poster goes on, and so does everything after it."""
    inbox = make_inbox()
    seen = Recorder()
    inbox.add_listener(seen)
    inbox.post(ev.Freed("nobody"))
    inbox.post(ev.Requested(2, "a"))
    assert [type(event).__name__ for event, _ in seen.seen] == ["Freed", "Requested"]
    assert "the scheduler failed on Freed" in caplog.text
