"""Another allowance for a loaded model."""

from __future__ import annotations

import json

import pytest

from pagein.errors import DoesNotFit, NoRoom

GIB = 1024**3


def test_the_new_plan_is_printed(pagein, daemon):
    """What it keeps within, of which memory, and what becomes of its weights."""
    result = pagein("allowance", "chat", "2GiB")
    assert result.stdout == (
        "chat is resident and keeps within 2.0 GiB of ram\n  12 of 48 blocks resident\n  memory 2.0 GiB\n"
    )
    assert daemon.seen == [("allowance", {"memory": 2 * GIB})]


def test_a_pool_may_be_named(pagein, daemon):
    """Then the daemon refuses another than that of the weights."""
    assert pagein("allowance", "chat", "2GiB", "--pool", "cuda:0").exit_code == 0
    assert daemon.seen == [("allowance", {"memory": 2 * GIB, "pool": "cuda:0"})]


def test_json_has_model_and_plan(pagein, daemon):
    """For programs."""
    body = json.loads(pagein("allowance", "chat", "2GiB", "--json").stdout)
    assert (body["model"]["name"], body["memory"]) == ("chat", 2 * GIB)
    assert body["plan"] == ["12 of 48 blocks resident", "memory 2.0 GiB"]


@pytest.mark.parametrize("size", ["much", "0", "-1GiB"])
def test_what_is_no_size_is_refused_before_anybody_is_asked(pagein, daemon, size):
    """With the word that was given."""
    result = pagein("allowance", "chat", "--", size)
    assert (result.exit_code, "SIZE" in result.stderr) == (2, True)
    assert daemon.seen == []


@pytest.mark.parametrize(
    "error",
    [
        NoRoom("model 'chat' cannot have 1.5 GiB more of ram: 1.0 GiB is free", pool="ram"),
        DoesNotFit(3 * GIB, 2 * GIB, {"runtime": GIB, "KV": 2 * GIB}, "give 1.0 GiB more"),
    ],
)
def test_a_refusal_has_both_numbers(pagein, daemon, error):
    """Nothing changed then; the exit code is that of memory that is not there."""
    daemon.fail = error
    result = pagein("allowance", "chat", "2GiB")
    assert result.exit_code == error.exit_code
    assert error.message in result.stderr.replace("\n", " ")


def test_without_a_daemon_it_ends_with_its_code(pagein, nowhere):
    """As every command does."""
    assert pagein("allowance", "chat", "2GiB").exit_code == 8
