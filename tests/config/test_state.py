"""The section `state`, and the one word that switches all of it off."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.config.load import load_settings
from pagein.errors import ConfigError


def load(folder: Path, text: str, **variables: str):
    """Load a configuration of these lines."""
    file = folder / "pagein.yaml"
    file.write_text(text)
    return load_settings(file, variables).state


@pytest.mark.parametrize(
    ("text", "enabled"), [("state: off", False), ("state: on", True), ("state: false", False), ("", True)]
)
def test_one_word_switches_it(tmp_path, text, enabled):
    """`state: off` is `state: {enabled: false}`; without a word it is on."""
    assert load(tmp_path, text).enabled is enabled


def test_the_environment_wins_over_the_word(tmp_path):
    """A variable switches on again what the file switches off by its word."""
    assert load(tmp_path, "state: off", PAGEIN_STATE__ENABLED="true").enabled


def test_units(tmp_path):
    """Bounds are written with units."""
    state = load(tmp_path, "state: {retain: 2d, history_bytes: 5MiB, disk: 10%}")
    assert (state.retain, state.history_bytes, state.disk) == (172800.0, 5 * 1024**2, 0.1)


def test_a_salt_is_not_repeated(tmp_path):
    """A wrong salt is refused without being shown, and a right one is not shown either."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "state: {salt: hush}")
    assert "hush" not in caught.value.message
    assert "long-secret" not in repr(load(tmp_path, "state: {salt: long-secret}"))
