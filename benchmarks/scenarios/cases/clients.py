"""Scenarios of clients: those that wait for a cold load, and those that leave."""

from __future__ import annotations

import random
import time

from scenarios.contract import Fails, Model, Running, Stage
from scenarios.registry import scenario

LEAVERS = 30
LOAD_SECONDS = 4.0
IDLE_SECONDS = 1.5


@scenario(19, "client waits for a cold load", "400 s load → 4 s, 60 s idle time-out → 1.5 s, heartbeat 5 s → 0.5 s")
def cold_load(stage: Stage) -> str:
    """A streaming client hears something while the model loads, and no content that is not there."""
    running = stage.start(Model("a", load_seconds=LOAD_SECONDS), room=1)
    stream = running.stream("a")
    plain = running.chat("a")
    stream.wait(30)
    if not stream.is_whole():
        raise Fails(f"the stream: {stream.told()}")
    waits = plain.status == 200 or (plain.status == 503 and "retry-after" in plain.headers)
    if not waits:
        raise Fails(f"the plain request: {plain.told()}")
    if stream.longest_silence > IDLE_SECONDS:
        raise Fails(f"{stream.longest_silence:.1f} s without a byte; a client with an idle time-out has left")
    said = next((line for line in stream.lines if line.startswith(b":")), b"").decode()
    return f"at most {stream.longest_silence:.1f} s of silence (`{said[:60]}`); the plain one: {plain.status}"


@scenario(20, "disconnect leaves model busy, or a useless load", "50 clients → 30")
def disconnects(stage: Stage) -> str:
    """Clients leave while they are queued, loading or streaming; afterwards the model can be evicted."""
    chance = random.Random(20)
    running = stage.start(Model("a"), Model("b"), Model("slow", load_seconds=15.0), room=1)
    streams = []
    for _ in range(LEAVERS):
        streams.append(running.stream("a", 5.0))
        time.sleep(chance.uniform(0, 0.1))
        if chance.random() < 0.6:
            streams.pop(chance.randrange(len(streams))).hang_up()
    for stream in streams:
        stream.hang_up()
    answer = running.chat("b")
    if answer.status != 200 or answer.seconds > 10:
        raise Fails(f"after all {LEAVERS} have left B is answered after {answer.seconds:.1f} s: {answer.told()}")
    return f"B answered {answer.seconds:.1f} s after the last of {LEAVERS} left; {_aborts_useless_load(running)}"


def _aborts_useless_load(running: Running) -> str:
    unwanted = running.stream("slow")
    running.until("the slow load begins", lambda: "slow" in running.engines().values(), 10)
    unwanted.hang_up()
    answer = running.chat("b")
    if answer.status != 200:
        raise Fails(f"after a client left a load, B: {answer.told()}")
    if answer.seconds > 8:
        raise Fails(f"a load of 15 s that nobody wants went on: B after {answer.seconds:.1f} s")
    return f"a load that nobody wanted gave way after {answer.seconds:.1f} s"
