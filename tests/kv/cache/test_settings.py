"""Thresholds, and marks with hysteresis."""

from __future__ import annotations

import pytest

from pagein.errors import KvSettingsWrong
from pagein.kv.tiers.settings import KvSettings, Mark


def test_defaults_are_k3():
    """The defaults are those of the row K3, and nothing is lossy."""
    settings = KvSettings()
    assert (settings.active, settings.warm, settings.host_share, settings.pinned_share) == (4, 12, 0.78, 0.35)
    assert not settings.lossy


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_share": 0.0},
        {"host_share": 1.2},
        {"slack": 0.9},
        {"active": 0},
        {"warm": -1},
        {"max_tokens": 0},
        {"compression": "int2"},
    ],
)
def test_refuses_what_cannot_be(wrong: dict[str, object]):
    """A setting that is no share, no count or no compression is refused by its name."""
    with pytest.raises(KvSettingsWrong, match=next(iter(wrong))):
        KvSettings(**wrong)  # type: ignore[arg-type]


def test_mark_has_hysteresis():
    """Above the high mark it asks until the low one is reached, and not again before the high one."""
    mark = Mark(0.9, 0.8)
    assert mark.excess(90, 100) == 0
    assert mark.excess(91, 100) == 11
    assert mark.excess(85, 100) == 5
    assert mark.excess(80, 100) == 0
    assert mark.excess(85, 100) == 0
