"""Errors that came as JSON are those that were sent."""

from __future__ import annotations

import json

import pytest

from pagein.errors import NotLoaded, PageinError, PartsBusy, PartTooLarge, UnknownTask, error_told
from pagein.gateway.problems import problem


@pytest.mark.parametrize(
    "error", [NotLoaded("m", "absent", "…"), PartTooLarge("tag", 3000, 2000, 2500), UnknownTask("sing", ["tag"])]
)
def test_an_error_survives_the_way(error: PageinError) -> None:
    """Class, status, message, hint and numbers."""
    told = error_told(json.loads(json.dumps(problem(error)))["error"])
    assert type(told) is type(error)
    assert (told.message, told.hint, told.details) == (error.message, error.hint, error.details)


@pytest.mark.parametrize("body", [{}, {"code": "no such code", "message": None}, {"code": ["x"], "self": 1, "hint": 7}])
def test_whatever_comes_is_an_error(body: dict[str, object]) -> None:
    """What is not known is an error all the same, and nothing in it can break its making."""
    told = error_told(body)
    assert type(told) is PageinError
    assert told.message


def test_a_part_that_lacks_a_few_bytes_shows_them():
    """Two numbers that print alike would say that it fits."""
    told = PartTooLarge("tag", 471_859_300, 471_859_200, 471_859_200).message
    assert told == (
        "part 'tag' needs 471,859,300 B, the model's allowance can give it at most 471,859,200 B of 471,859,200 B"
    )
    assert "needs 3.0 MiB, 2.0 MiB of" in PartsBusy("tag", 3 << 20, 2 << 20, 1.0, "all is in use").message
    assert "needs 2,097,153 B, 2,097,152 B of" in PartsBusy("tag", 2_097_153, 2 << 20, 1.0, "all is in use").message
