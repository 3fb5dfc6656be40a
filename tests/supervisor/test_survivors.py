"""Processes that even SIGKILL does not end at once (stuck in the kernel) stay known and charged."""

from __future__ import annotations

import os

from pagein.supervisor import child as module
from pagein.supervisor.tree import Tree


async def test_survivors_are_reported_and_killed_again(start_worker, monkeypatch):
    """An ending names what is left, and a later kill tries again."""
    child = await start_worker("--grandchild", "session")
    real = Tree.kill
    survivors = iter([1, 1])

    def kill_but_fail(tree: Tree, timeout: float) -> list:
        left = real(tree, timeout)
        return [tree.root] if next(survivors, 0) else left

    monkeypatch.setattr(Tree, "kill", kill_but_fail)
    ending = await child.stop(grace=30)
    assert ending.survivors == (child.pid,)
    assert (await child.kill()).survivors == ()


async def test_a_tree_that_survives_everything_does_not_hold_the_daemon(start_worker, monkeypatch):
    """Even then a stop returns, and says so."""
    child = await start_worker("--ignore-sigterm")
    monkeypatch.setattr(module, "_KILL_TIMEOUT", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Tree, "kill", lambda tree, timeout: tree.members())
        ending = await child.stop(grace=0.1)
    assert ending.returncode is None
    assert ending.how == "survives SIGKILL"
    assert child.pid in ending.survivors
    assert os.getpid() not in ending.survivors
