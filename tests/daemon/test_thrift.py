"""The daemon's own memory."""

import subprocess
import sys

import pytest

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
