"""Saves turns and is ended in the middle of it: run by `test_crash.py`, as a process of its own.

crash.py loop ROOT            conversations go on, are forgotten and begun anew until somebody ends it
crash.py step ROOT EVERY      fork, save a turn, SIGKILL at a system call, check what is there; at every so many calls
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

from pagein.kv.disk import Found
from tests import dying
from tests.kv.disk.build import GROUPS, check_account, check_found, disk_bytes, open_store, save, text, words

CAP = 4 * 1024**2
LENGTHS = (60_000, 8192)
CALLS = ("open", "unlink", "posix_fallocate", "pwritev", "truncate", "scandir", "posix_fadvise")
TALKS = 3
SLOT = 69_632


def said(talk, turn):
    """What a conversation is after a turn."""
    return text(words(50 * turn, seed=talk))


def save_turn(store, number):
    """One turn of one of the conversations; now and then one is forgotten first."""
    talk, turn = number % TALKS, number // TALKS % 8 + 1
    if turn == 1:
        store.forget(f"c{talk}")
    save(store, said(talk, turn), GROUPS, conversation=f"c{talk}", lengths=LENGTHS)


def check(root):
    """After a crash: whatever is found is what was put, nothing half, the account that of the disk."""
    store = open_store(root, cap=CAP)
    assert store.verify() == []
    lengths = []
    for talk in range(TALKS):
        found = store.walk(said(talk, 8), GROUPS)
        lengths.append(found.length if isinstance(found, Found) else 0)
        if isinstance(found, Found):
            check_found(store, said(talk, -(-found.length // 50)), found, LENGTHS)
            assert found.length % 50 == 0
    usage = store.usage()
    assert usage.block_bytes == usage.blocks * SLOT
    assert usage.spare_bytes == 0
    assert usage.bytes <= CAP
    assert disk_bytes(root) <= CAP
    check_account(store, root)
    held = {node.key for turns in store._tree.turns.values() for turn in turns for node in turn.up()}
    assert {node.key for node in store._tree.nodes.values() if node.parent is not None} == held
    store.close()
    return lengths


def die_at(moment):
    """Count system calls and changes of the catalogue, and end without a trace before or after the chosen one."""
    wrap = dying.die_at(moment, CALLS)
    import pagein.kv.disk.catalogue as catalogue
    import pagein.kv.disk.system as system

    system.punch = wrap(system.punch)

    class Connection(sqlite3.Connection):
        execute = wrap(sqlite3.Connection.execute)
        executemany = wrap(sqlite3.Connection.executemany)

    real = sqlite3.connect
    catalogue.sqlite3.connect = lambda *args, **kwargs: real(*args, factory=Connection, **kwargs)


def main():
    kind, root = sys.argv[1], Path(sys.argv[2])
    if kind == "step":
        number, moment, killed = 12, 0, True
        while killed:
            store = open_store(root, cap=CAP)
            for talk in range(TALKS):
                save(store, said(talk, number // TALKS), GROUPS, conversation=f"c{talk}", lengths=LENGTHS)
            store.close()
            child = os.fork()
            if child == 0:
                die_at(moment)
                store = open_store(root, cap=CAP)
                save_turn(store, number)
                store.forget("c1")
                os._exit(0)
            killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
            lengths = check(root)
            print(moment, "killed" if killed else "done", *lengths, flush=True)
            # Before and after the turn, of the first; whole or forgotten, of the second; untouched, of the third.
            assert lengths[0] in (200, 250), lengths
            assert lengths[1] in (200, 0), lengths
            assert lengths[2] == 200, lengths
            moment += int(sys.argv[3])
    else:
        store, number = open_store(root, cap=CAP), 0
        while number < 100_000:
            print(number, flush=True)
            save_turn(store, number)
            number += 1


if __name__ == "__main__":
    main()
