"""Levels, and which requests take part."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagein.parts.rollout import Level, Rollout, Route, place_of

KEYS = [f"session-{n}" for n in range(4000)]


def parts(percent: float, level: Level = Level.AUTO) -> set[str]:
    rollout = Rollout(level, percent)
    return {key for key in KEYS if rollout.route(key) is Route.PARTS}


def test_levels_say_what_they_do():
    """From nothing on demand to everything: what is loaded at the start, may come, may leave."""
    said = {
        level: (rollout.loads_all_at_start, rollout.loads_on_demand, rollout.evicts)
        for level in Level
        for rollout in [Rollout(level)]
    }
    assert said == {
        Level.OFF: (True, False, False),
        Level.BACKBONE: (False, False, False),
        Level.MANUAL: (False, True, False),
        Level.AUTO: (False, True, True),
    }


def test_off_is_the_whole_model_for_everyone():
    """Switched off, no request goes by parts, whatever the percentage."""
    assert parts(100, Level.OFF) == set()


@pytest.mark.parametrize("percent", [0, 5, 25, 50, 100])
def test_a_percentage_of_requests(percent):
    """About that share of keys takes part, none at 0 and all at 100."""
    share = 100 * len(parts(percent)) / len(KEYS)
    assert share == percent if percent in (0, 100) else abs(share - percent) < 3


def test_raising_it_lets_nobody_go():
    """Who took part at a lower percentage does at a higher one."""
    assert parts(5) < parts(25) < parts(26) < parts(90)


def test_a_key_goes_the_same_way_in_every_process():
    """The hash does not depend on the process: its seed, or its number."""
    code = "from pagein.parts.rollout import place_of; print(place_of('session-7'))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {"0.7516066333523312\n"}


def test_any_text_is_a_key():
    """Keys come from requests: half characters of other encodings are keys, too."""
    assert 0 <= place_of("\udcff") < 1
    assert 0 <= place_of("") < 1


@pytest.mark.parametrize("percent", [-1, 101, float("nan")])
def test_a_percentage_lies_between_0_and_100(percent):
    """Anything else is an error."""
    with pytest.raises(ValueError, match="between 0 and 100"):
        Rollout(Level.AUTO, percent)


def test_an_unknown_level_is_told_with_those_that_there_are():
    """`load_parts` and `set_level` take a word of the user's."""
    with pytest.raises(ValueError, match="level is one of off, backbone, manual, auto, not 'sometimes'"):
        Level("sometimes")
