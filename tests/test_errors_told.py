"""Errors that came as JSON are those that were sent."""

from __future__ import annotations

import json

import pytest

from pagein.errors import NotLoaded, PageinError, PartTooLarge, UnknownTask, error_told
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
