"""A process that is killed in the middle of turns: the next one continues from the disk, and nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.kv.cache.tiers import Plain, check_whole, make, pool_of, turn, words

pytestmark = pytest.mark.torch

CAP = 3 * 1024**2
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("turns", [3, 12, 40])
def test_kill_and_restart(turns: int, tmp_path: Path):
    """Scenarios 7, 13: kill -9 after some turns; hits continue, answers are right, the disk stays within its cap."""
    folder, said = tmp_path / "kv", {}
    for life in range(2):
        said |= _live(folder, seed=life, turns=turns)
        model = make()
        pool = pool_of(model, 10, folder, disk_cap=CAP)
        assert _disk_bytes(folder) <= CAP
        assert pool._below.cold.store.verify() == []
        reused = 0
        for number, (name, tokens) in enumerate(sorted(said.items())):
            prompt = [*tokens[:300], *words(9, seed=number)]
            out, reuse = turn(pool, model, name, prompt)
            assert out == Plain(model).turn(name, prompt), (name, reuse)
            reused += reuse.tokens
        assert reused > 0
        check_whole(pool)
        report = pool.report()
        assert report.disk is not None
        # A file of many extents takes some pages more for the list of them, which nobody knows before.
        assert abs(report.disk.used - _disk_bytes(folder)) <= 4 * 4096
        assert _disk_bytes(folder) <= CAP
        pool.close()
        assert _disk_bytes(folder) <= CAP


def _live(folder: Path, seed: int, turns: int) -> dict[str, list[int]]:
    """Run turns in a process of their own, kill it in the middle of one, and return what was said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kv.cache.crash", str(folder), str(seed), str(CAP)]
    said: dict[str, list[int]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        for _ in range(turns):
            name, *tokens = process.stdout.readline().split()
            said[name] = [int(one) for one in tokens]
        process.kill()
    return said


def _disk_bytes(folder: Path) -> int:
    """What the folder takes, as `du` counts it."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
