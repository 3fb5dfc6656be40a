"""Engine options from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from pagein.engines.options import read_options
from pagein.errors import ConfigError


@dataclass(frozen=True)
class Options:
    needed: int
    level: Literal["low", "high"] | bool = "low"
    share: float = 0.5
    name: str | None = None
    words: list[str] = field(default_factory=list)


def test_defaults_and_given_values():
    """What is not given has its default."""
    assert read_options(Options, {"needed": 1, "words": ["a"]}, "m") == Options(1, words=["a"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"need": 1}, "there is no option 'need'; did you mean 'needed'?"),
        ({"xyz": 1}, "there is no option 'xyz'; known: level, name, needed, share, words"),
        ({}, "option 'needed' is required"),
        ({"needed": "1"}, "option 'needed' takes a whole number, not '1'"),
        ({"needed": True}, "option 'needed' takes a whole number, not True"),
        ({"needed": 1, "level": "mid"}, "option 'level' takes low, high or true or false, not 'mid'"),
        ({"needed": 1, "words": ["a", 1]}, "option 'words' takes a list of text"),
        ({"needed": 1, "name": 3}, "option 'name' takes text, not 3"),
    ],
)
def test_a_wrong_option_is_refused(given, message):
    """The error names the model, the option and what it takes or the nearest known one."""
    with pytest.raises(ConfigError) as caught:
        read_options(Options, given, "m")
    assert f"model 'm': {message}" in caught.value.message


def test_what_is_allowed_is_allowed():
    """A number without a fraction is a number, and a choice may also be a switch."""
    options = read_options(Options, {"needed": 1, "share": 1, "level": True, "name": None}, "m")
    assert (options.share, options.level, options.name) == (1, True, None)
