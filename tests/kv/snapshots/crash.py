"""Saves snapshots and is ended in the middle of it: run by `test_crash.py`, as a process of its own.

crash.py step ROOT COUNT      for each of COUNT moments: fork, save a new turn, SIGKILL at that system call
crash.py loop ROOT            save turn after turn until somebody ends it; a line for each
crash.py limit ROOT BYTES     save a turn under a limit on the size of files; print what became of it
crash.py plain ROOT           the same without a limit
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from pagein.kv.snapshots.answers import Kept
from pagein.kv.snapshots.store import Store
from tests.dying import die_at
from tests.kv.snapshots.build import offer, payload_of

SIZE = 3 * 1024**2 + 5
CALLS = ("open", "unlink", "rename", "fsync", "mkdir", "utime", "pread")


def save(store: Store, turn: int) -> object:
    """Save a turn of the one conversation."""
    tokens = list(range(10 * turn))
    return store.put(offer(tokens, SIZE, conversation="c"), payload(turn, tokens))


def payload(turn: int, tokens: list[int]):
    whole = b"".join(payload_of(tokens, SIZE))
    for start in range(0, SIZE, 500_000):
        os.getppid()  # a moment in mid-write
        yield whole[start : start + 500_000]


def main() -> None:
    kind, root = sys.argv[1], Path(sys.argv[2])
    if kind == "step":
        for moment in range(int(sys.argv[3])):
            store = Store.open(root, cap=10**9, floor=0)  # the next start, each time
            turn = len(store.entries()) and store.entries()[0].header.tokens // 10
            child = os.fork()
            if child == 0:
                die_at(moment, (*CALLS, "getppid"))
                save(store, turn + 1)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            print(turn, "killed" if os.WIFSIGNALED(status) else "done", flush=True)
            check(root, turn)
    elif kind == "loop":
        store, turn = Store.open(root, cap=10**9, floor=0), 0
        turn = max((entry.header.tokens // 10 for entry in store.entries()), default=0)
        while turn < 100_000:
            turn += 1
            print(turn, flush=True)
            assert isinstance(save(store, turn), Kept)
    else:
        store = Store.open(root, cap=10**9, floor=0)
        if kind == "limit":
            limit = int(sys.argv[3])
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        print(save(store, 50))


def check(root: Path, before: int) -> None:
    """After a crash: the previous turn or the new one, sound, nothing half, and the account that of the disk."""
    store = Store.open(root, cap=10**9, floor=0)
    turns = [entry.header.tokens // 10 for entry in store.entries()]
    # Both for a moment: the new one lies on disk before the old one goes.
    assert set(turns) <= {before, before + 1}, turns
    assert turns or before == 0
    for entry in store.entries():
        assert store.verify(entry.id) is None
    on_disk = [path for path in root.rglob("*") if path.is_file()]
    assert len(on_disk) == len(turns), on_disk
    assert store.usage().bytes == sum(path.stat().st_size for path in on_disk)


if __name__ == "__main__":
    main()
