"""Split models that are closed after their test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def load() -> Iterator[Any]:
    """Return a function that loads a split as `pagein.load_parts` does, without a thread of its own."""
    opened: list[Any] = []

    def open_split(folder: Any, *arguments: Any, **options: Any) -> Any:
        from pagein import load_parts

        model = load_parts(folder, *arguments, **{"sweep_seconds": None, "wait": 60.0, **options})
        opened.append(model)
        return model

    yield open_split
    for model in opened:
        model.pagein.residency.guard.check()
        model.pagein.close()
