"""The daemon's own memory."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import weakref

import pytest

from pagein.daemon import thrift

PROGRAM = """
import threading
from pagein.daemon.thrift import few_arenas
print(few_arenas())
held = []
gate = threading.Barrier(9)
def work():
    held.append([bytearray(700) for _ in range(1000)])
    gate.wait()
    gate.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
gate.wait()
print(open("/proc/self/maps").read().count("---p 00000000 00:00 0"))
gate.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are glibc's")
def test_threads_share_few_arenas():
    """Eight threads that allocate do not make eight arenas, each with its reserve of address space."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    if told[0] == "False":
        pytest.skip("this C library has no arenas to limit")
    without = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("print(few_arenas())", "print(0)")], capture_output=True, text=True
    ).stdout.split()
    assert int(told[1]) < int(without[1])


class _Knot:
    """Refers to itself, as an error and its frames do."""

    def __init__(self) -> None:
        self.me = self


async def test_what_refers_only_to_itself_goes(monkeypatch):
    """It does not wait until Python looks for it by itself, which may be long after the memory is missed."""
    monkeypatch.setattr(thrift, "EVERY", 0.0)
    gc.disable()
    try:
        left = weakref.ref(_Knot())
        assert left() is not None
        giving = asyncio.create_task(thrift.give_back_for_ever())
        async with asyncio.timeout(30):
            while left() is not None:
                await asyncio.sleep(0)
        giving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await giving
    finally:
        gc.enable()


def test_what_the_start_made_is_not_searched_again():
    """A search looks at what came since, so that it may happen often."""
    counts = "print(gc.get_freeze_count() > 1000, len(gc.get_objects()))"
    program = f"import gc, pagein.daemon.thrift as thrift; thrift.set_aside(); {counts}"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "True"
    assert int(told[1]) < 1000
