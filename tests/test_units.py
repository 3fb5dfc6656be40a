"""Sizes and durations at the edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.units import format_apart, format_bytes, format_duration, parse_bytes, parse_duration, parse_percent


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 * 1024**3),
        ("6gib", 6 * 1024**3),
        ("500MB", 500_000_000),
        ("500 MB", 500_000_000),
        ("1.5G", 1536 * 1024**2),
        ("2T", 2 * 1024**4),
        ("3K", 3072),
        ("12", 12),
        ("12B", 12),
        (" 7 KiB ", 7168),
        (0, 0),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_are_read(text, count):
    """KiB and bare letters count in 1024, KB in 1000, and whole numbers of bytes lose nothing."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "5iB", "1e3", "-1", "-5GiB", "6 gigs", "1.", ".5G", "1,5G", "٣GiB", "9" * 400, -1, True, 2**63]
)
def test_what_is_no_size_is_refused(text):
    """Anything else is a ValueError, never a guess, an overflow or a float that lost digits."""
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@given(st.integers(0, 2**63 - 1))
def test_bytes_survive_as_a_plain_number(count):
    """A number of bytes reads back exactly."""
    assert parse_bytes(str(count)) == count


@given(st.integers(0, 2**62))
def test_printed_bytes_read_back_within_their_rounding(count):
    """What `format_bytes` prints, `parse_bytes` reads, off by less than the last printed digit."""
    printed = format_bytes(count)
    number, unit = printed.split()
    half_a_digit = 0.051 if "." in number else 0.501
    assert abs(parse_bytes(printed) - count) <= half_a_digit * parse_bytes(f"1 {unit}")


@given(st.integers(1, 2**60))
def test_printed_bytes_stay_below_the_next_unit(count):
    """No number is printed as 1024 of a unit that has a larger one."""
    number, unit = format_bytes(count).split()
    assert float(number) < 1024 or unit == "TiB"


def test_unknown_is_printed_as_unknown():
    """None is no number (rule 11)."""
    assert format_bytes(None) == format_duration(None) == "unknown"


@pytest.mark.parametrize(
    ("count", "printed"),
    [(0, "0 B"), (512, "512 B"), (2048, "2 KiB"), (8_482_560_410, "7.9 GiB"), (150 * 1024**2, "150 MiB")],
)
def test_bytes_are_printed_for_people(count, printed):
    """One decimal below a hundred of a unit, none above."""
    assert format_bytes(count) == printed


@pytest.mark.parametrize(("text", "share"), [("85%", 0.85), (" 85 % ", 0.85), ("100%", 1.0), ("0.5%", 0.005)])
def test_percentages_are_read(text, share):
    """A percentage is a fraction of one."""
    assert parse_percent(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["85", "6GiB", "", "%", "-5%"])
def test_other_texts_are_no_percentage(text):
    """A text that is no percentage gives None, so that it can be read as something else."""
    assert parse_percent(text) is None


@pytest.mark.parametrize("text", ["0%", "0.0%", "120%", f"{'9' * 19}%"])
def test_a_percentage_lies_above_zero_and_at_most_a_hundred(text):
    """Nothing and more than everything are refused."""
    with pytest.raises(ValueError, match="percentage"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("1h", 3600),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("5m00s", 300),
        ("1.8 s", 1.8),
        ("90", 90),
        (0, 0),
        (0.5, 0.5),
    ],
)
def test_durations_are_read(text, seconds):
    """Units may follow one another; a bare number is seconds."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "m", "soon", "-5s", "5 5m", "5mx", "1h 30", "1e3", "inf", -1, math.nan, math.inf, 10**400, True]
)
def test_what_is_no_duration_is_refused(text):
    """Anything else is a ValueError; there is no endless duration (rule 6)."""
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.floats(0, 1e7))
def test_printed_durations_read_back_within_their_rounding(seconds):
    """What `format_duration` prints, `parse_duration` reads, off by less than the last printed unit."""
    step = 0.0006 if seconds < 1 else 0.06 if seconds < 60 else 1 if seconds < 3600 else 61
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= step


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(0.25, "250 ms"), (0.9999, "1.0 s"), (1.84, "1.8 s"), (59.99, "1m00s"), (300, "5m00s"), (7500, "2h05m")],
)
def test_durations_are_printed_for_people(seconds, printed):
    """The unit follows the length."""
    assert format_duration(seconds) == printed


def test_two_sizes_that_differ_never_look_alike():
    """In bytes where they would; else as ever."""
    assert format_apart(471_859_300, 471_859_200) == ("471,859,300 B", "471,859,200 B")
    assert format_apart(3 << 20, 2 << 20) == ("3.0 MiB", "2.0 MiB")
    assert format_apart(5 << 20, 5 << 20) == ("5.0 MiB", "5.0 MiB")
