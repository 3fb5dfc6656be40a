"""The option ``kv``: what `pagein tune kv` prints is taken, and mistakes are named."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from pagein.engines.writing.kv_options import read_kv
from pagein.errors import ConfigError, KvSettingsWrong

pytestmark = pytest.mark.torch


def test_sizes_and_thresholds_are_read():
    """Bytes as sizes, the rest as the tiers' own settings; without any they have their defaults."""
    found = read_kv({"memory": "64MiB", "host": 1024, "warm": 3, "compression": "int8"}, 4, "m")
    assert (found.memory, found.host, found.settings.warm, found.settings.lossy) == (64 * 1024**2, 1024, 3, True)
    plain = read_kv(None, 40, "m")
    assert (plain.memory, plain.host, plain.settings.active) == (None, None, 40)
    assert read_kv({"active": 2}, 4, "m").settings.active == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [({"wram": 1}, "did you mean 'warm'"), ({"memory": "much"}, "memory"), ({"host": True}, "host")],
)
def test_mistakes_name_the_model_and_the_key(given, words):
    """With the nearest known one."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_kv(given, 4, "chat")
    assert "'chat'" in caught.value.message


def test_shares_that_contradict_each_other_are_refused():
    """By the tiers themselves, which name the field and its value."""
    with pytest.raises(KvSettingsWrong, match="host_share"):
        read_kv({"host_share": 2}, 4, "m")
