"""Crashes and full disks in the middle of a save (scenario 7 of the KV list)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pagein.kv.snapshots.store import Store
from tests.kv.snapshots.build import bytes_on_disk, drafts, offer
from tests.kv.snapshots.crash import SIZE, check

pytestmark = pytest.mark.scenarios

SCRIPT = Path(__file__).parent / "crash.py"
TOP = Path(__file__).parents[3]
MOMENTS = 45


def command(*args):
    return [sys.executable, str(SCRIPT), *map(str, args)]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(TOP / "src")])}


def test_a_kill_at_every_system_call_of_a_save_loses_nothing(tmp_path):
    """SIGKILL before and after each call that a save makes: then the previous turn or the new one, sound, no drafts."""
    done = subprocess.run(
        command("step", tmp_path, MOMENTS), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [line.split()[1] for line in done.stdout.splitlines()]
    assert ends.count("killed") >= 20
    assert ends[-1] == "done", "not every moment was reached"


def test_kills_at_random_moments_lose_nothing(tmp_path):
    """A process that saves turn after turn is killed at any time; the next one goes on from what lies on disk."""
    chance = random.Random(7)
    for _ in range(8):
        with subprocess.Popen(
            command("loop", tmp_path), env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            turn = 0
            for _ in range(chance.randint(1, 12)):
                turn = int(process.stdout.readline())
            for _ in range(chance.randint(0, 200_000)):
                pass  # a moment within the save that was begun
            process.kill()
            said = [int(line) for line in process.stdout]
        check(tmp_path, max([turn, *said]) - 1)


def test_a_file_size_limit_in_mid_write_leaves_nothing(tmp_path):
    """The save is skipped with the system's reason; the previous snapshot stands."""
    for kind, words in (("plain", "Kept("), ("limit", "File too large")):
        limit = [SIZE // 2] if kind == "limit" else []
        folder = tmp_path if kind == "plain" else tmp_path / "second"
        done = subprocess.run(
            command(kind, folder, *limit), env=environment(), capture_output=True, text=True, timeout=60
        )
        assert words in done.stdout, done.stdout + done.stderr
    assert bytes_on_disk(tmp_path / "second") == 0
    assert len(Store.open(tmp_path, cap=10**9, floor=0).entries()) == 1


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to mount a small disk")
def test_a_full_disk_in_mid_write_leaves_nothing(tmp_path):
    """With a disk that is smaller than what it says, the draft goes again and the reason is the system's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        root = disk / "kv"
        first = subprocess.run(command("plain", root), env=environment(), capture_output=True, text=True, timeout=60)
        assert "Kept(" in first.stdout, first.stderr
        store = Store.open(root, cap=10**9, floor=0)
        kept = store.entries()
        (disk / "others").write_bytes(b"x" * (3 * 1024**2))
        store._shelf.free_bytes = lambda: 10**9  # as if another program took the space after the check
        refused = store.put(offer([9, 9, 9], SIZE, conversation="other"), [b"y" * SIZE])
        assert "No space left" in refused.reason
        assert store.entries() == kept
        assert drafts(root) == []
        assert store.usage().bytes == bytes_on_disk(root)
        assert store.verify(kept[0].id) is None
    finally:
        subprocess.run(["umount", str(disk)], check=True)
