"""What a fake engine takes: memory, mapped files, and processes that hide and hold more of it."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

PAGE = 4096


def touch(size: int) -> bytearray:
    """Take memory and write to each of its pages, so that it is really there."""
    block = bytearray(size)
    for offset in range(0, size, PAGE):
        block[offset] = 1
    return block


def map_file(size: int) -> mmap.mmap:
    """Map a file and read each of its pages."""
    with tempfile.TemporaryFile() as file:
        for _ in range(0, size, 1024**2):
            file.write(b"\1" * 1024**2)
        file.flush()
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    for offset in range(0, size, PAGE):
        mapped[offset]
    return mapped


def start_grandchild(kind: str, size: int) -> int:
    """Fork a process that stays; returns its id. The more hidden kinds leave session, parent and environment."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if kind != "plain":
            os.setsid()
        if kind in ("orphan", "hidden") and os.fork() != 0:
            os._exit(0)
        os.set_inheritable(writing, True)
        code = f"import os, signal; b = bytearray({size}); b[::{PAGE}] = b'1' * len(b[::{PAGE}]); "
        code += f"os.write({writing}, str(os.getpid()).encode() + b'.'); os.close({writing}); signal.pause()"
        environment = {} if kind == "hidden" else dict(os.environ)
        os.execve(sys.executable, [sys.executable, "-S", "-c", code], environment)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        number = int(pipe.read().rstrip("."))
    if kind in ("orphan", "hidden"):
        os.waitpid(child, 0)
    return number
