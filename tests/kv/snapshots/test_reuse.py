"""The engine's own counters."""

from __future__ import annotations

import json

import pytest

from pagein.kv.snapshots.reuse import LONGEST_EVENT, Counted, CountedInStream, counted

TIMINGS = {"cache_n": 1047, "prompt_n": 21, "prompt_ms": 250.0, "predicted_n": 8}


def event(value):
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_llama_cpp_tells_what_it_reused():
    """``timings`` stands in each answer."""
    assert counted({"timings": TIMINGS, "usage": {}}) == Counted(1047, 21, 0.25, 8)


def test_other_servers_tell_it_in_usage():
    """OpenAI's way."""
    usage = {"prompt_tokens": 45, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 36}}
    assert counted({"usage": usage}) == Counted(36, 9, None, 3)


@pytest.mark.parametrize(
    "answer",
    [{}, {"timings": None}, {"timings": {"cache_n": -1, "prompt_n": 3}}, {"timings": {"cache_n": True, "prompt_n": 3}},
     {"timings": {"cache_n": "4", "prompt_n": 3}}, {"usage": None}, {"usage": {"prompt_tokens": 4}},
     {"usage": {"prompt_tokens": 4, "prompt_tokens_details": None}},
     {"usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}}],
)  # fmt: skip
def test_no_counters_are_no_proof(answer):
    """Unknown is None, never 0."""
    assert counted(answer) is None


@pytest.mark.parametrize(
    ("cached", "computed", "restored", "used"),
    [(1047, 21, 1047, True), (1046, 22, 1047, False), (99, 1, 100, True), (98, 2, 100, False), (0, 100, 100, False),
     (50, 1, 100, True), (0, 1, 5, True)],
)  # fmt: skip
def test_a_restore_is_used_when_all_of_it_was(cached, computed, restored, used):
    """The last token of a prompt is always computed, so a prompt that was restored whole reuses all but that."""
    assert Counted(cached, computed).proves(restored) is used


@pytest.mark.parametrize("size", [1, 2, 7, 100000])
def test_counters_are_found_in_a_stream(size):
    """However it is cut into chunks."""
    stream = event({"choices": [{"delta": {"content": 'says "timings"'}}]}) + event({"timings": TIMINGS})
    stream = b": waiting\n\n" + stream.replace(b"\n\n", b"\r\n\r\n") + b"data: [DONE]\n\n"
    watch = CountedInStream()
    for at in range(0, len(stream), size):
        watch.feed(stream[at : at + size])
    assert watch.value == Counted(1047, 21, 0.25, 8)


def test_what_a_model_says_is_no_counter():
    """Text that looks like counters stays text."""
    watch = CountedInStream()
    watch.feed(event({"choices": [{"delta": {"content": json.dumps({"timings": TIMINGS})}}]}))
    watch.feed(b'data: {"timings": broken\n\n')
    assert watch.value is None


def test_an_endless_event_is_not_kept():
    """Its rest is no event of its own; the next one counts again."""
    watch = CountedInStream()
    watch.feed(b"x" * (LONGEST_EVENT + 1))
    watch.feed(event({"timings": TIMINGS}))
    assert watch.value is None
    watch.feed(event({"timings": TIMINGS}))
    assert watch.value is not None
