"""Measured speeds outlive a restart."""

from __future__ import annotations

import json
import stat

import pytest

from pagein.kv.snapshots import paces as module
from pagein.kv.snapshots.paces import Paces
from pagein.kv.snapshots.worth import Pace

KEY, OTHER = "model and build 1", "model and build 2"


def measured(paces, key=KEY):
    """A model whose prefill, restore and save were measured."""
    pace = paces.of(key)
    pace.prefilled(1000, 4.0)
    for size in (10**6, 10**7):
        pace.restored(size, 0.01 + size / 1e9)
        pace.saved(size, 0.02 + size / 1e8)
    return pace


def test_what_was_measured_is_there_after_a_restart(tmp_path):
    """The same verdicts with the same numbers, and no word of a guess."""
    paces = Paces(tmp_path / "paces.json")
    before = measured(paces)
    paces.write(paces.measured())
    after = Paces(tmp_path / "paces.json").of(KEY)
    assert after.can_restore(500, 5 * 10**6) == before.can_restore(500, 5 * 10**6)
    assert after.can_save(500, 5 * 10**6, 0.01) == before.can_save(500, 5 * 10**6, 0.01)
    assert "not all measured" not in after.can_restore(500, 5 * 10**6).reason
    after.restored(10**7, 5.0)
    assert after.restoring.seconds(10**7) > before.restoring.seconds(10**7), "measuring goes on"


def test_another_build_is_measured_anew(tmp_path):
    """What one build did says nothing of the next; what was never measured takes no place in the file."""
    paces = Paces(tmp_path / "paces.json")
    measured(paces)
    assert not paces.of(OTHER).prefill.measured
    paces.write(paces.measured())
    assert list(json.loads((tmp_path / "paces.json").read_text())) == [KEY]


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", '{"model and build 1": 7}', '{"model and build 1": {"prefill": [250]}}', "{" * 100_000,
        '{"model and build 1": {"prefill": [-1], "restoring": [], "saving": []}}',
        '{"model and build 1": {"prefill": [NaN], "restoring": [], "saving": []}}',
        '{"model and build 1": {"prefill": [0], "restoring": [], "saving": []}}',
        '{"model and build 1": {"prefill": ["fast"], "restoring": [], "saving": []}}',
        '{"model and build 1": {"prefill": [], "restoring": [1, 2], "saving": []}}',
        '{"model and build 1": {"prefill": [], "restoring": [0, 0, 0, 0, 0], "saving": []}}',
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_measured_again(tmp_path, text):
    """A damaged file is as none; nothing of it is believed."""
    (tmp_path / "paces.json").write_text(text)
    assert Paces(tmp_path / "paces.json").of(KEY) == Pace()


def test_a_damaged_row_costs_no_other_row(tmp_path):
    """Each key is read for itself."""
    paces = Paces(tmp_path / "paces.json")
    measured(paces)
    rows = {OTHER: 7, **paces.measured()[1]}
    (tmp_path / "paces.json").write_text(json.dumps(rows))
    assert Paces(tmp_path / "paces.json").of(KEY).prefill.measured


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    """Whole or not at all, for its owner only, and no draft stays."""
    paces = Paces(tmp_path / "paces.json")
    measured(paces)
    paces.write(paces.measured())
    before = (tmp_path / "paces.json").read_bytes()
    assert stat.S_IMODE((tmp_path / "paces.json").stat().st_mode) == 0o600

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    measured(paces, OTHER)
    paces.write(paces.measured())
    assert [path.name for path in tmp_path.iterdir()] == ["paces.json"]
    assert (tmp_path / "paces.json").read_bytes() == before


def test_an_older_write_that_comes_late_changes_nothing(tmp_path):
    """Threads may finish in another order than they began."""
    paces = Paces(tmp_path / "paces.json")
    old = paces.measured()
    measured(paces)
    paces.write(paces.measured())
    paces.write(old)
    assert Paces(tmp_path / "paces.json").of(KEY).prefill.measured


def test_the_longest_unused_are_forgotten(tmp_path, monkeypatch):
    """The file does not grow for ever."""
    monkeypatch.setattr(module, "MOST_REMEMBERED", 2)
    paces = Paces(tmp_path / "paces.json")
    for key in ("a", "b"):
        measured(paces, key)
    paces.of("a")
    measured(paces, "c")
    assert set(paces.measured()[1]) == {"a", "c"}
