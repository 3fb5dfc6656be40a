"""Scenarios of models that exclude each other: who is loaded when, and whom that costs what."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import chain

from scenarios.client import Later, Stream, all_of
from scenarios.contract import LONGEST_WAIT, PATIENCE, Fails, Model, Running, Stage
from scenarios.registry import scenario
from scenarios.watch import Watch

CLIENTS, TURNS = 20, 6
LOOP_SECONDS = 14.0


@scenario(3, "swap storm", "20 clients, 6 requests each")
def swap_storm(stage: Stage) -> str:
    """Twenty clients alternate between two models that exclude each other."""
    running = stage.start(Model("a"), Model("b"), room=1)

    def client(number: int) -> list[str]:
        answers = (running.chat("ab"[(number + turn) % 2]) for turn in range(TURNS))
        return [answer.told() for answer in answers if answer.status != 200]

    began = time.monotonic()
    with Watch(running) as watch:
        told = all_of([partial(client, number) for number in range(CLIENTS)], 55)
    wrong = list(chain.from_iterable(told))
    seconds, requests, loads = time.monotonic() - began, CLIENTS * TURNS, watch.loads()
    if wrong:
        raise Fails(f"{len(wrong)} of {requests} not answered, the first {wrong[0]}")
    if loads > requests // 4:
        raise Fails(f"{loads} loads for {requests} requests, more than one for four")
    return f"{requests} answered in {seconds:.0f} s with {loads} loads"


@scenario(4, "thrash between two agent loops", "2 s gap → 0.2 s, 5 s load → 0.5 s, patience 30 s → 3 s")
def two_loops(stage: Stage) -> str:
    """Two loops with tool pauses on models that exclude each other: few swaps, and nobody waits too long."""
    running = stage.start(Model("a", load_seconds=0.5), Model("b", load_seconds=0.5), room=1)
    until = time.monotonic() + LOOP_SECONDS
    longest = {"a": 0.0, "b": 0.0}
    served = {"a": 0, "b": 0}

    def loop(name: str) -> None:
        while time.monotonic() < until:
            longest[name] = max(longest[name], running.must(name).seconds)
            served[name] += 1
            time.sleep(0.2)

    with Watch(running) as watch:
        all_of([lambda: loop("a"), lambda: loop("b")], 50)
    most, bound = int(LOOP_SECONDS / (PATIENCE / 2)), PATIENCE + 2.5
    said = f"{watch.loads()} loads in {LOOP_SECONDS:.0f} s, {sum(served.values())} answers"
    said += f", longest wait {max(longest.values()):.1f} s"
    if watch.loads() > most:
        raise Fails(f"{said}: more loads than {most}")
    if max(longest.values()) > bound:
        raise Fails(f"{said}: longer than {bound:g} s (patience, load, answer)")
    return said


@scenario(5, "starvation", "longest wait 300 s → 20 s")
def starvation(stage: Stage) -> str:
    """Constant overlapping traffic on A, one request for B."""
    running = stage.start(Model("a"), Model("b"), room=1)
    running.must("a")
    stop = threading.Event()

    def traffic() -> int:
        count = 0
        while not stop.is_set():
            running.must("a", tokens=running.tokens(0.3))
            count += 1
        return count

    clients = [Later(traffic) for _ in range(3)]
    time.sleep(0.5)
    try:
        answer = running.chat("b")
    finally:
        stop.set()
    count = sum(client.result() for client in clients)
    if answer.status != 200 or answer.seconds > LONGEST_WAIT:
        raise Fails(f"B after {answer.seconds:.1f} s: {answer.told()}")
    return f"B answered after {answer.seconds:.1f} s, beside {count} answers of A"


@scenario(6, "concurrent cold loads")
def cold_loads(stage: Stage) -> str:
    """B and C in the same moment with room for one; then ten at once for cold D."""
    running = stage.start(Model("a"), Model("b"), Model("c"), Model("d"), room=1)
    running.must("a")
    with Watch(running) as watch:
        all_of([lambda: running.must("b"), lambda: running.must("c")])
        all_of([lambda: running.must("d")] * 10)
    if watch.loads("d") != 1:
        raise Fails(f"{watch.loads('d')} processes of D were started")
    return "B and C both answered; ten for D, one process"


@scenario(7, "evicted before first use")
def first_use(stage: Stage) -> str:
    """B is asked for while A loads: A's request is served before A may leave."""
    slow = 0.5
    running = stage.start(Model("a", load_seconds=slow), Model("b", load_seconds=slow), room=1)
    with Watch(running) as watch:
        first = Later(lambda: running.must("a"))
        time.sleep(0.1)
        second = Later(lambda: running.must("b"))
        waits = first.result().seconds, second.result().seconds
    if watch.loads("a") != 1 or watch.loads("b") != 1:
        raise Fails(f"A was loaded {watch.loads('a')} times, B {watch.loads('b')} times")
    return f"A after {waits[0]:.1f} s, B after {waits[1]:.1f} s, one load each"


@scenario(8, "in-flight killed by swap", "60 s stream → 4 s")
def in_flight(stage: Stage) -> str:
    """A streams, B is asked for: the stream ends whole, B waits and is served then."""
    running = stage.start(Model("a"), Model("b"), room=1)
    running.must("a")
    stream = running.stream("a", 4.0)
    stream.first_token.wait(20)
    waiting = running.stream("b")
    stream.wait(30)
    waiting.wait(30)
    for name, each in (("A", stream), ("B", waiting)):
        if not each.is_whole():
            raise Fails(f"{name}'s stream: {each.told()}")
    return f"A's stream whole after {stream.seconds:.1f} s, B after {waiting.seconds:.1f} s{_heard(waiting)}"


def _heard(stream: Stream) -> str:
    comments = sum(line.startswith(b":") for line in stream.lines)
    return f", told {comments} times what it waits for" if comments else ", told nothing meanwhile"


@scenario(14, "different context per client", "20k and 8k → 900 and 10 words")
def contexts(stage: Stage) -> str:
    """Two clients with long and short prompts take turns on one model: one process."""
    running = stage.start(Model("a"), room=1)
    with Watch(running) as watch:
        for _ in range(4):
            for words in (900, 10):
                _long(running, words)
    if watch.loads() != 1:
        raise Fails(f"{watch.loads()} loads of one model")
    return "8 prompts of two lengths, one process"


def _long(running: Running, words: int) -> None:
    message = {"role": "user", "content": "red " * words}
    answer = running.chat("a", messages=[message])
    if answer.status != 200:
        raise Fails(f"a prompt of {words} words: {answer.told()}")
