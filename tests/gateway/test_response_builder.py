"""From the pieces of a chat to the events of a response: what holds for every order of pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pagein.errors import BadAnswer
from pagein.gateway import chat_answer
from pagein.gateway.chat_answer import CallPiece, Piece, piece_of_event, whole_answer
from pagein.gateway.response_builder import ResponseBuilder

STRICT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SHOWN = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
WORDS = st.text(max_size=4)
PIECES = st.lists(
    st.builds(
        Piece,
        content=WORDS,
        reasoning=WORDS,
        calls=st.lists(
            st.builds(CallPiece, st.integers(0, 2), st.sampled_from(["", "call_1"]), st.just("f"), WORDS), max_size=2
        ).map(tuple),
        finish=st.sampled_from([None, "stop", "length", "tool_calls"]),
    ),
    max_size=8,
)


def run(pieces: list[Piece]) -> tuple[ResponseBuilder, list[dict[str, Any]]]:
    """Translate pieces and return all events."""
    builder = ResponseBuilder("resp_1", "m", SHOWN)
    events = [event for piece in pieces for event in builder.add(piece)]
    return builder, [*events, *builder.finish(), builder.last()]


@settings(deadline=None)  # other work on the machine must not fail it
@given(PIECES)
def test_every_stream_is_a_whole_one(pieces: list[Piece]) -> None:
    """Events are valid and numbered; each item is added once, in order, and done once; deltas add up to the items."""
    _, events = run(pieces)
    for event in events:
        STRICT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    response = events[-1]["response"]
    assert [item["id"] for item in response["output"]] == added
    assert sorted(done) == sorted(added)
    assert all(done[item["id"]] == item for item in response["output"])
    for kind, key in (("output_text", "content"), ("reasoning_text", "reasoning")):
        said = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        assert said == "".join(getattr(piece, key) for piece in pieces)
    for item in response["output"]:
        deltas = "".join(e["delta"] for e in events if e["type"].endswith("delta") and e["item_id"] == item["id"])
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@settings(deadline=None)  # other work on the machine must not fail it
@given(PIECES)
def test_a_failure_is_the_last_event(pieces: list[Piece]) -> None:
    """A response may fail after any piece; its event is valid and continues the numbers."""
    builder = ResponseBuilder("resp_1", "m", SHOWN)
    events = [event for piece in pieces for event in builder.add(piece)]
    last = builder.fail(502, {"message": "gone", "code": "worker_died"})
    STRICT.validate_python(last)
    assert last["sequence_number"] == len(events)
    assert last["type"] == ("response.failed" if events else "error")


def test_an_empty_answer_is_a_message() -> None:
    """A chat that says nothing gives one empty message, so that questions and answers keep alternating."""
    _, events = run([Piece(finish="stop")])
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == [""]


@pytest.mark.parametrize(
    "data",
    [
        b"[]", b"no json", b'{"choices": 5}', b'{"choices": [null]}', b'{"choices": [{"delta": "x"}]}', b"{}",
        b'{"choices": [{"delta": {"content": 5, "tool_calls": [1, {"function": 2, "index": -1}]}}]}',
    ],
)  # fmt: skip
def test_an_odd_event_adds_no_text(data: bytes) -> None:
    """Whatever an engine sends, reading it raises nothing and invents nothing."""
    piece = piece_of_event(data)
    assert (piece.content, piece.reasoning, piece.finish, piece.error) == ("", "", None, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": 5}]}', b'{"error": {}}'])
def test_a_whole_answer_needs_a_message(body: bytes) -> None:
    """What is no chat is a bad answer of the worker."""
    with pytest.raises(BadAnswer, match="'m'"):
        whole_answer("m", body)


def test_an_endless_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put together in memory is bounded, calls of tools and empty pieces of them included."""
    monkeypatch.setattr(chat_answer, "LONGEST", 2000)
    calls = [Piece(calls=(CallPiece(index, "", "f", ""),)) for index in range(1000)]
    turns = [Piece(**{kind: "x"}) for kind in ("content", "reasoning") * 1000]
    for pieces in (calls, turns, [Piece(content="x" * 3000)]):
        with pytest.raises(BadAnswer, match="2 KiB"):
            run(pieces)
