"""Scenarios of processes that hang, crash, hide or are left behind."""

from __future__ import annotations

import signal
import time

from scenarios.client import Later
from scenarios.contract import Fails, Model, Running, Stage, alive
from scenarios.registry import scenario

HUNG_AFTER = 3.0
ENDED_WITHIN = 5.0


@scenario(9, "hung request blocks everything", "a request counts as hung after 3 s")
def hung(stage: Stage) -> str:
    """A's engine stops in the middle of a request, C is in use: B gets A's room within a bound, C serves meanwhile."""
    running = stage.start(Model("a", timeout=HUNG_AFTER), Model("b"), Model("c"), room=2)
    running.must("c")
    running.must("a")
    process = running.engine("a")
    process.send_signal(signal.SIGSTOP)
    try:
        stuck = Later(lambda: running.chat("a"))
        stream = running.stream("c", 2 * HUNG_AFTER)
        stream.first_token.wait(20)
        waiting = Later(lambda: running.chat("b"))
        beside = running.must("c").seconds
        answer, cut = waiting.result(50), stuck.result(50)
        stream.wait(20)
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)
    if answer.status != 200:
        raise Fails(f"B after {answer.seconds:.1f} s: {answer.told()}")
    if cut.status == 200 or not stream.is_whole():
        raise Fails(f"the hung request was answered {cut.told()}; C's stream: {stream.told()}")
    running.until("A answers again", lambda: running.chat("a").status == 200, 20)
    return f"B after {answer.seconds:.1f} s, A's request {cut.status}; C streamed on and answered in {beside:.1f} s"


@scenario(16, "orphans after SIGKILL of the manager")
def orphans(stage: Stage) -> str:
    """kill -9 of the manager with two models up."""
    running = stage.start(Model("a"), Model("b"), room=2)
    running.must("a")
    running.must("b")
    began, started = time.monotonic(), running.kill()
    running.until(f"all {len(started)} processes have ended", lambda: not alive(started), ENDED_WITHIN)
    seconds = time.monotonic() - began
    stage.start(Model("a"), Model("b"), room=2).must("a")  # and the next one cleans up and serves
    return f"{len(started)} processes ended within {seconds:.1f} s; the next manager serves"


@scenario(17, "orphan grandchildren")
def grandchildren(stage: Stage) -> str:
    """The engine hid a process in a session of its own and is killed."""
    running = stage.start(Model("a", fault="grandchild"), room=2)
    running.must("a")
    engine = running.engine("a")
    hidden = engine.children(recursive=True)
    if not hidden:
        raise Fails("the engine has no grandchild: the scenario is void")
    engine.kill()
    running.until("the grandchild has ended", lambda: not alive(hidden), 2 * ENDED_WITHIN)
    running.until("the model answers again", lambda: running.chat("a").status == 200, 20)
    return f"{len(hidden)} hidden processes ended; the model came back"


@scenario(18, "child crash and crash loop", "5 times each → twice")
def crashes(stage: Stage) -> str:
    """Engines that die before they listen, while they load, and in the middle of a stream."""
    running = stage.start(Model("broken", fault="dies"), Model("slow", load_seconds=2.0), Model("a"), room=3)
    running.must("a")
    before = running.engine("a")
    told = [running.chat("broken") for _ in range(2)]
    if any(answer.status in (0, 200) for answer in told):
        raise Fails(f"a model that cannot start: {told[0].told()}")
    loading = _die_while_loading(running)
    if running.engine("a") != before:
        raise Fails("another model was restarted for it")
    broken = _die_in_stream(running)
    zombies = [p for p in running.tree() if p.status() == "zombie"]
    if zombies:
        raise Fails(f"{len(zombies)} zombies")
    states = {state for name, state in running.states().items() if state in ("loading", "leaving")}
    if states:
        raise Fails(f"still {states}")
    return f"before listening {told[0].status}, while loading {loading}, mid-stream {broken}; all can be retried"


def _die_while_loading(running: Running) -> int:
    asked = Later(lambda: running.chat("slow"))
    running.until("the slow engine starts", lambda: "slow" in running.engines().values())
    running.engine("slow").kill()
    answer = asked.result(40)
    if answer.status == 0:
        raise Fails(f"an engine that dies while loading: {answer.told()}")
    running.until("slow answers when tried again", lambda: running.chat("slow").status == 200, 20)
    return answer.status


def _die_in_stream(running: Running) -> str:
    stream = running.stream("a", 4.0)
    stream.first_token.wait(20)
    running.engine("a").kill()
    stream.wait(20)
    if not stream.ended:
        raise Fails("a stream whose engine died does not end")
    if stream.is_whole() or b"data: [DONE]" in stream.lines:
        raise Fails("a stream whose engine died looks whole")
    if not stream.has_error_event():
        raise Fails(f"a stream whose engine died ends without an error event: {stream.told()}")
    running.until("the model answers again", lambda: running.chat("a").status == 200, 20)
    return "an error event"
