"""Children die with the daemon, even where it is killed (row G11)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.workers import living

from pagein.protocol import encode

DAEMON = """
import asyncio, json, sys
from pathlib import Path
from pagein.protocol import decode
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.log import ModelLog

async def main():
    spec = decode(sys.stdin.buffer.readline())
    log = ModelLog(Path(spec.socket_dir) / "log", 1000, 1)
    environ = worker_environment(spec, {})
    if sys.argv[1] == "loading":
        asyncio.create_task(Child.start(spec, environ=environ, log=log, on_spawn=lambda pid: print([pid], flush=True)))
    else:
        child = await Child.start(spec, environ=environ, log=log)
        print(json.dumps(await child.pids()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["loading", "ready"])
@pytest.mark.parametrize(
    "switches", [[], ["--grandchild", "session"], ["--grandchild", "hidden"], ["--ignore-sigterm"]]
)
def test_kill_9_of_the_daemon_leaves_nothing(fake_spec, short_folder, moment, switches):
    """Worker, server and helpers in sessions of their own end without anybody's help."""
    gate = ["--unhealthy"] if moment == "loading" else []
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, moment], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    daemon.stdin.write(encode(fake_spec(*gate, *switches, socket_dir=short_folder)))
    daemon.stdin.flush()
    pids = json.loads(daemon.stdout.readline())
    tree = [psutil.Process(pid) for pid in pids]
    tree += [process for process in tree[0].children(recursive=True) if process not in tree]
    daemon.send_signal(signal.SIGKILL)
    daemon.communicate()
    deadline = time.monotonic() + 30
    while living(tree):
        assert time.monotonic() < deadline, f"still there: {[p for p in tree if p.pid in living(tree)]}"
