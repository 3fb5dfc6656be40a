"""Stop strings, however they are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.engines.local.stops import StopFinder


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    text = "".join(finder.feed(piece) for piece in pieces)
    return text + finder.rest(), finder.found


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["Hello"], [], "Hello", False),
        (["Hel", "lo"], ["lo"], "Hel", True),
        (["a", "b", "c", "d"], ["bc"], "a", True),
        (["ab", "ab", "ac"], ["abac"], "ab", True),
        (["one two"], ["two", "one"], "", True),
        (["a\n", "\nb"], ["\n\n"], "a", True),
        (["a\n", "b"], ["\n\n"], "a\nb", False),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    pieces: list[str], stops: list[str], text: str, found: bool
) -> None:
    """It is found across pieces, the earliest one counts, and what only began like it is shown in the end."""
    assert shown(pieces, stops) == (text, found)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_the_cut_is_that_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """Whatever the pieces, what is shown is the text up to the earliest end of a stop string's first appearance."""
    whole = "".join(pieces)
    text, found = shown(pieces, stops)
    assert found == any(stop in whole for stop in stops)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    if not found:
        assert text == whole


def test_nothing_is_shown_after_a_stop() -> None:
    """What the model writes on before it is stopped stays hidden."""
    finder = StopFinder(["x"])
    assert [finder.feed(piece) for piece in ("a", "x", "b")] == ["a", "", ""]
