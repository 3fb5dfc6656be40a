"""Framing of server-sent events."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pagein.gateway import sse

PIECES = st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b"\r", b"[DONE]", b": c", b"\n\n", b"\r\n\r\n"]))


@given(PIECES, st.lists(st.integers(0, 200)))
def test_cutting_changes_no_byte(pieces: list[bytes], cuts: list[int]) -> None:
    """However a stream arrives, the same bytes leave in the same order."""
    whole = b"".join(pieces)
    places = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    events = sse.WholeEvents()
    passed = b"".join(events.feed(whole[a:b]) for a, b in itertools.pairwise(places))
    assert passed + events.rest() == whole


@given(PIECES, st.lists(st.integers(0, 200)))
def test_only_whole_events_pass_before_the_end(pieces: list[bytes], cuts: list[int]) -> None:
    """What has passed always ends with an empty line, so another event may follow it."""
    whole = b"".join(pieces)
    places = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    events = sse.WholeEvents()
    for a, b in itertools.pairwise(places):
        passed = events.feed(whole[a:b])
        assert not passed or passed.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def test_an_endless_event_is_not_collected() -> None:
    """An event above the limit passes in pieces: memory stays bounded."""
    events = sse.WholeEvents()
    sent = b"".join(events.feed(b"x" * 10_000) for _ in range(100))
    assert len(sent) > 700_000
    assert len(events.rest()) < 300_000


def test_a_stream_is_finished_by_its_mark_or_an_error() -> None:
    """[DONE] as the last event and an error event are regular ends; the words inside an answer are not."""
    for last, finished in [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"content": "say [DONE] now"}\n\n', False),
        (b'data: {"content": "an \\"error\\" here"}\n\n', False),
        (b"data: [DONE]", True),
        (b"", False),
    ]:
        events = sse.WholeEvents()
        events.feed(b"data: {}\n\n")
        events.feed(last)
        events.rest()
        assert events.finished is finished, last


def test_a_comment_is_one_line() -> None:
    """No reason, whatever it contains, can end the comment and begin an event."""
    assert sse.comment("a\r\n\ndata: x\u2028y") == b": a data: x y\n\n"


def test_an_event_is_one_line_of_data() -> None:
    """Values with line ends stay inside the JSON text."""
    assert sse.event({"a": "x\ny\u2028"}, 7) == 'id: 7\ndata: {"a": "x\\ny\u2028"}\n\n'.encode()
