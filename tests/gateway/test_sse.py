"""Framing of server-sent events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.gateway import sse
from pagein.gateway.answers import excerpt

PIECES = st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b"\r", b"[DONE]", b": c", b"\n\n", b"\r\n\r\n"]))


@given(PIECES, st.lists(st.integers(0, 200)))
def test_cutting_changes_no_byte(pieces: list[bytes], cuts: list[int]) -> None:
    """However a stream arrives, the same bytes leave in the same order."""
    whole = b"".join(pieces)
    places = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    events = sse.WholeEvents(checked=False)
    passed = b"".join(events.feed(whole[a:b]) for a, b in itertools.pairwise(places))
    assert passed + events.rest() == whole


@given(PIECES, st.lists(st.integers(0, 200)))
def test_only_whole_events_pass_before_the_end(pieces: list[bytes], cuts: list[int]) -> None:
    """What has passed always ends with an empty line, so another event may follow it."""
    whole = b"".join(pieces)
    places = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    events = sse.WholeEvents(checked=False)
    for a, b in itertools.pairwise(places):
        passed = events.feed(whole[a:b])
        assert not passed or passed.endswith((b"\n\n", b"\n\r\n", b"\r\r"))


def test_an_endless_event_is_not_collected() -> None:
    """An event above the limit is a fault, from which on nothing passes: memory stays bounded."""
    events = sse.WholeEvents()
    sent = b"".join(events.feed(b"data: " + b"x" * 10_000) for _ in range(200))
    assert events.fault == "an event of more than 1.0 MiB"
    assert (sent, events.feed(b"\n\ndata: {}\n\n"), events.rest()) == (b"", b"", b"")


def test_a_stream_is_finished_by_its_mark_or_an_error() -> None:
    """[DONE] as an event of its own and an error event are regular ends; the words inside an answer are not."""
    for last, finished in [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"content": "say [DONE] now"}\n\n', False),
        (b'data: {"content": "an \\"error\\" here"}\n\n', False),
        (b'data: {"content": "", "error": null}\n\n', False),
        (b": [DONE]\n\n", False),
        (b"data: [DONE]", True),
        (b"", False),
    ]:
        events = sse.WholeEvents()
        events.feed(b"data: {}\n\n")
        events.feed(last)
        events.rest()
        assert (events.finished, events.fault) == (finished, None), last


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b""])
@pytest.mark.parametrize("bad", [b"data: {not json", b"data: [1, 2", b"data: 7", b'data: "x"', b"event: e\ndata: no"])
def test_an_event_that_is_no_json_object_does_not_pass(bad: bytes, end: bytes) -> None:
    """What came before it does, nothing that comes after it, and the fault shows what it was."""
    events = sse.WholeEvents()
    passed = events.feed(b'data: {"a": 1}\n\n' + bad + end) + events.feed(b"data: [DONE]\n\n" if end else b"")
    assert passed + events.rest() == b'data: {"a": 1}\n\n'
    assert events.fault is not None
    assert excerpt(bad.rpartition(b"data: ")[2]) in events.fault
    assert not events.finished


@pytest.mark.parametrize(
    "good",
    [
        b": ping\n\n",
        b"event: x\nid: 3\nretry: 10\n\n",
        b"data:\n\n",
        b'data: {"a":\ndata: 1}\n\n',
        b'id: 1\ndata: {"a": "\\ud83d"}\n\n',
        b'data:{"a": "\xc3\xa9"}\r\n\r\n',
    ],
)
def test_every_kind_of_event_passes(good: bytes) -> None:
    """Comments, names, ids, data over several lines, and half an emoji are what the standard and engines allow."""
    events = sse.WholeEvents()
    assert events.feed(good) == good
    assert (events.fault, events.finished) == (None, False)


def test_nothing_passes_after_the_end_mark() -> None:
    """What an engine sends after [DONE] is nobody's."""
    events = sse.WholeEvents()
    assert events.feed(b"data: {}\n\ndata: [DONE]\n\ndata: {}\n\n") == b"data: {}\n\ndata: [DONE]\n\n"
    assert (events.feed(b"data: {}\n\n"), events.rest()) == (b"", b"")


def test_an_event_without_its_empty_line_is_completed() -> None:
    """At the regular end of a stream its last event is whole, and another may follow it."""
    events = sse.WholeEvents()
    assert events.feed(b'data: {"a": 1}\n') == b""
    assert events.rest() == b'data: {"a": 1}\n\n'


def test_a_comment_is_one_line() -> None:
    """No reason, whatever it contains, can end the comment and begin an event."""
    assert sse.comment("a\r\n\ndata: x\u2028y") == b": a data: x y\n\n"


def test_an_event_is_one_line_of_data() -> None:
    """Values with line ends stay inside the JSON text."""
    assert sse.event({"a": "x\ny\u2028"}, 7) == 'id: 7\ndata: {"a": "x\\ny\u2028"}\n\n'.encode()


def test_events_are_split_with_their_data() -> None:
    """Each complete event comes as it stands, whatever its line ends, with its data; a comment has none."""
    whole = b': hi\n\ndata: {"a": 1}\n\nevent: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata: [DONE]\n\n'
    pieces = list(sse.split(whole))
    assert b"".join(raw for raw, _ in pieces) == whole
    assert [data for _, data in pieces] == [b"", b'{"a": 1}', b"1\n2", sse.END]


def test_an_event_has_its_name_and_any_text() -> None:
    """A named event, and half an emoji in it, which UTF-8 has no bytes for."""
    assert sse.event({"a": "\ud83d"}, name="x") == b'event: x\ndata: {"a": "\\ud83d"}\n\n'
