"""Scenarios of bytes: sizes that are wrong, sizes that are ignored, memory that does not come back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from common.memory import pss_of_tree
from scenarios.client import Later, all_of
from scenarios.contract import MIB, SIZE, Fails, Model, NotApplicable, Running, Stage
from scenarios.registry import scenario
from scenarios.watch import Watch

CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CYCLES = 10


@scenario(1, "estimate too low → OOM", "1 GB → 100 MiB")
def estimate_too_low(stage: Stage) -> str:
    """A liar takes four times what it declared, beside another model."""
    budget = 640 * MIB
    running = stage.start(
        Model("liar", 100 * MIB, takes=400 * MIB), Model("idle", 300 * MIB), Model("other", 60 * MIB), budget=budget
    )
    running.must("idle")
    running.must("other")
    asked = Later(lambda: running.chat("liar"))
    highest = 0
    while not asked.done:
        highest = max(highest, pss_of_tree(running.program.pid))
    answer = asked.result()
    if answer.status == 0:
        raise Fails(f"the request for the liar was {answer.told()}")
    again = running.chat("liar")
    if again.status != 200:
        raise Fails(f"the second request for the liar was {again.told()}")
    running.must("other")
    margin = 64 * MIB
    if highest > budget + margin:
        raise Fails(f"the sum reached {highest // MIB} MiB of {budget // MIB} MiB")
    return f"sum at most {highest // MIB} of {budget // MIB} MiB; liar {answer.status}, then {again.status}"


@scenario(2, "count policy hides size", "10 GB → 1000 MiB")
def count_hides_size(stage: Stage) -> str:
    """Eight of ten are taken, four are asked for: eight leaves; two of three stay side by side."""
    running = stage.start(
        Model("eight", 800 * MIB), Model("four", 400 * MIB), Model("three", 300 * MIB), budget=1000 * MIB
    )
    for name in ("eight", "four", "three"):
        running.must(name)
    loaded = running.loaded()
    if loaded != {"four", "three"}:
        raise Fails(f"loaded are {sorted(loaded)}")
    return "eight left for four; four and three side by side"


@scenario(15, "memory not returned", "50 cycles → 10")
def memory_returned(stage: Stage) -> str:
    """Load and unload again and again; what the manager's tree takes comes back to what it was."""
    running = stage.start(Model("a"), Model("b"), room=2)

    def cycle() -> None:
        for name in ("a", "b"):
            running.must(name)
        for name in ("a", "b"):
            running.unload(name)
        running.until("no engine runs", lambda: not running.engines())

    cycle()
    before = pss_of_tree(running.program.pid)
    for _ in range(CYCLES):
        cycle()
    more = 8 * MIB + before // 10

    def is_back() -> bool:
        return pss_of_tree(running.program.pid) <= before + more

    running.until(f"the tree is back within {more // MIB} MiB of {before // MIB} MiB", is_back, 10)
    after = pss_of_tree(running.program.pid)
    said = f"{before // MIB} MiB before, {after // MIB} MiB after {CYCLES} cycles"
    stage.stack.close()
    try:
        running = stage.start(Model("sleeper", sleep="sleeps"), Model("liar", sleep="sleep-lies"), Model("b"), room=1)
    except NotApplicable as reason:
        return f"in part: {said}; {reason}"
    return f"{said}; {_catches_a_lying_sleep(running)}"


def _catches_a_lying_sleep(running: Running) -> str:
    kept = {}
    for name in ("sleeper", "liar"):
        running.must(name)
        process = running.engine(name)
        running.must("b")
        running.until(f"{name} sleeps or has ended", lambda: running.states()[name] != "leaving", 10)  # noqa: B023
        kept[name] = process.is_running()
    if kept["liar"]:
        raise Fails("an engine whose sleep frees a tenth was kept")
    return f"a sleep that lies was ended, an honest one {'kept' if kept['sleeper'] else 'ended too'}"


@scenario(21, "cgroup limit below the machine's memory", "8 GB → 600 MiB")
def cgroup_limit(stage: Stage) -> str:
    """In a group of 600 MiB a model of 800 MiB is refused before it is started, and nothing is killed."""
    with _group(600 * MIB) as group:
        running = stage.start(Model("small", 100 * MIB), Model("large", 800 * MIB), memory_limit=group)
        running.must("small")
        with Watch(running) as watch:
            refused = running.chat("large")
        killed = _number(group / "memory.oom_control", "oom_kill")
        stage.stack.close()
    if refused.status == 200 or watch.loads("large"):
        raise Fails(f"large was started: {refused.told()}")
    if killed:
        raise Fails(f"{killed} processes were killed for memory")
    return f"refused with {refused.told()[:90]}"


@contextlib.contextmanager
def _group(limit: int) -> Iterator[Path]:
    """A memory group of its own (cgroup v1, as root)."""
    folder = CGROUP_V1 / f"pagein-bench-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NotApplicable(f"no memory group can be made on this machine: {error.strerror}") from None
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        yield folder
    finally:
        for line in (folder / "cgroup.procs").read_text().split():
            (CGROUP_V1 / "cgroup.procs").write_text(line)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _number(file: Path, key: str) -> int:
    rows = dict(line.split() for line in file.read_text().splitlines())
    return int(rows.get(key, 0))


@scenario(22, "embeddings + LLM together", "200 turns → 60")
def embeddings_beside(stage: Stage) -> str:
    """Two that fit side by side alternate without a reload; what can never fit evicts nobody."""
    running = stage.start(Model("embedder"), Model("chat"), room=2)
    with Watch(running) as watch:
        for _ in range(60):
            all_of([lambda: running.must("embedder"), lambda: running.must("chat")])
    if watch.loads() != 2:
        raise Fails(f"{watch.loads()} loads of two models that fit")
    stage.stack.close()
    pids = "60 turns, no reload"
    try:
        running = stage.start(Model("embedder", SIZE), Model("huge", 4096 * MIB), budget=500 * MIB)
    except NotApplicable as reason:
        return f"in part: {pids}; what can never fit cannot be told: {reason}"
    return f"{pids}; {_refuses_before_evicting(running)}"


def _refuses_before_evicting(running: Running) -> str:
    running.must("embedder")
    process = running.engine("embedder")
    refused = running.chat("huge")
    if refused.status == 200 or not process.is_running():
        raise Fails(f"for huge ({refused.status}) the embedder left")
    return f"huge: {refused.told()[:90]}, nobody left"
