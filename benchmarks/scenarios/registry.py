"""The list of scenarios: each is one function from a stage to a line of evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scenarios.contract import Stage

Case = Callable[[Stage], str]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario of the list of situations, with what was scaled down."""

    number: int
    what: str
    scale: str
    case: Case


SCENARIOS: dict[int, Scenario] = {}


def scenario(number: int, what: str, scale: str = "") -> Callable[[Case], Case]:
    """Add a function to the list; it returns its evidence, or raises Fails or NotApplicable."""

    def add(case: Case) -> Case:
        SCENARIOS[number] = Scenario(number, what, scale, case)
        return case

    return add
