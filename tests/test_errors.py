"""What every error of the project promises."""

from __future__ import annotations

import inspect
import json

import pytest

from pagein import errors
from pagein.errors import (
    CapabilityMissing,
    ContextLengthExceeded,
    ModelNotFound,
    NeverFits,
    PageinError,
    QueueFull,
    RequestTooLarge,
    WaitTooLong,
    WorkerTimeout,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PageinError)]
SAMPLES = [
    (ModelNotFound("cat", ["chat", "embed"]), ["'cat'", "chat, embed"]),
    (CapabilityMissing("embed", "chat", ["embedding"]), ["'embed'", "chat", "embedding"]),
    (RequestTooLarge(2 * 1024**2, 1024**2), ["2.0 MiB", "1.0 MiB"]),
    (ContextLengthExceeded("chat", 5000, 4096), ["'chat'", "5000", "4096"]),
    (NeverFits("chat", "ram", 8 * 1024**3, 6 * 1024**3, 7 * 1024**3, ["embed"]), ["8.0 GiB", "6.0 GiB", "7.0 GiB"]),
    (WaitTooLong("chat", 300.0, "embed is in use"), ["'chat'", "5m00s", "embed is in use"]),
    (QueueFull("chat", 64, 64), ["'chat'", "64 waiting", "limit is 64"]),
    (WorkerTimeout("chat", 30.0), ["'chat'", "30.0 s"]),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_error_has_its_status_and_its_meaning(kind):
    """Every error has a docstring, an HTTP error status and an exit code that a shell can tell from success."""
    assert kind.__doc__
    assert 400 <= kind.http_status <= 599
    assert 1 <= kind.exit_code <= 125


def test_no_two_errors_share_a_code():
    """A program tells errors apart by `code`."""
    codes = [kind.code for kind in KINDS]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize(("error", "words"), SAMPLES, ids=lambda item: type(item).__name__)
def test_messages_name_the_thing_and_both_numbers(error, words):
    """A message can be acted upon without reading a log."""
    assert [word for word in words if word not in error.message] == []
    assert str(error) == error.message


@pytest.mark.parametrize(("error", "words"), SAMPLES, ids=lambda item: type(item).__name__)
def test_details_can_be_sent_as_json(error, words):
    """The HTTP body repeats the numbers, so they are plain values."""
    assert json.loads(json.dumps(error.details)) == error.details


def test_a_hint_can_be_given_and_otherwise_comes_from_the_class():
    """One instance's hint does not leak into others of its class."""
    assert PageinError("x", hint="do this").hint == "do this"
    assert PageinError("x").hint is None
    assert QueueFull("chat", 1, 1).hint is not None


def test_unknown_numbers_are_words_not_zeros():
    """None is unknown (rule 11)."""
    assert "more tokens" in ContextLengthExceeded("chat", None, None).message
    assert "has more" in RequestTooLarge(None, 1024).message


def test_what_holds_the_memory_for_ever_is_named():
    """A refusal says which kept models are in the way, and does not mention any when there is none."""
    assert "with embed kept for ever" in NeverFits("chat", "ram", 2, 1, 3, ["embed"]).message
    assert "kept" not in NeverFits("chat", "ram", 2, 1, 3, []).message
