"""Scenarios of how long models stay: times to live, pins, load calls."""

from __future__ import annotations

import time

from scenarios.client import Later
from scenarios.contract import Fails, Model, NotApplicable, Stage
from scenarios.registry import scenario
from scenarios.watch import Watch

RACES = 40


@scenario(10, "TTL races a request", "500 requests → 40")
def ttl_races(stage: Stage) -> str:
    """Requests that arrive in the moment when the model's time ends."""
    ttl = 1.0 if stage.manager.name != "Pagein" else 0.3
    running = stage.start(Model("a", keep_alive=ttl, fault=None), room=1)
    wrong = []
    until, count = time.monotonic() + 48, 0
    while count < RACES and time.monotonic() < until:
        answer = running.chat("a")
        if answer.status != 200:
            wrong.append(answer.told())
        count += 1
        time.sleep(ttl + (count % 11 - 5) / 100)
    if wrong:
        raise Fails(f"{len(wrong)} of {count} not answered, the first {wrong[0]}")
    running.must("a")
    running.engine("a")
    return f"{count} of {count} answered at {ttl:g} s ± 50 ms; one process, as listed"


@scenario(11, "TTL counted from start, or kills what is active", "TTL 2 s → 1 s, generation 6 s → 3 s")
def ttl_active(stage: Stage) -> str:
    """A load and an answer that are longer than the time to live are not interrupted."""
    running = stage.start(Model("a", keep_alive=1.0, load_seconds=1.5), room=1)
    with Watch(running) as watch:
        stream = running.stream("a", 3.0).wait(30)
        if not stream.is_whole():
            raise Fails(f"the stream: {stream.told()}")
        time.sleep(0.3)
        again = running.must("a")
        if watch.loads() != 1:
            raise Fails(f"it was started {watch.loads()} times")
    return f"3 s of stream whole, next answer 0.3 s later from the same process in {again.seconds:.1f} s"


@scenario(12, "pinned but evicted")
def pinned(stage: Stage) -> str:
    """What fits only without the pinned model is refused, and the refusal names it."""
    running = stage.start(Model("keeper", pin=True), Model("x"), room=1)
    running.must("keeper")
    process = running.engine("keeper")
    refused = running.chat("x")
    if not process.is_running() or refused.status == 200:
        raise Fails(f"the pinned model left for x ({refused.status})")
    if b"keeper" not in refused.body:
        raise Fails(f"the refusal does not name it: {refused.told()}")
    return refused.told()[:120]


@scenario(13, "keep_alive semantics")
def keep_alive(stage: Stage) -> str:
    """A load call makes no model immortal; a request's own keep_alive counts."""
    running = stage.start(Model("a"), Model("b"), room=1)
    if running.load("a").status != 200:
        raise Fails("its load call fails")
    running.must("b")
    running.until("a left, which was loaded without a pin", lambda: "a" not in running.loaded(), 10)
    if not getattr(running, "keeps_alive_by_request", False):
        raise NotApplicable("no keep_alive per request (its load call makes no model immortal: tried)")
    running.must("a", keep_alive=0)
    running.until("a left after keep_alive: 0", lambda: "a" not in running.loaded(), 10)
    running.must("a", keep_alive="1s")
    if "a" not in running.loaded():
        raise Fails("with keep_alive 1s it left at once")
    running.until("a left after keep_alive: 1s", lambda: "a" not in running.loaded(), 10)
    running.must("a", keep_alive=-1)
    yielded = Later(lambda: running.must("b"))
    yielded.result()
    return "load call evictable; 0 leaves at once, 1s after it, -1 stays and yields to need"
