"""chat: conversations in the terminal, against a real gateway and store with a fake worker."""

from __future__ import annotations

import json

import pytest
from tests.gateway.talkers import messages

from pagein.protocol import Capability


def test_a_talk_goes_on(pagein, gateway):
    """Each line is a turn; a later call of the same name goes on where the first one ended."""
    first = pagein("chat", "m", "--session", "talk", "--system", "Be brief", input="one\n\ntwo\n")
    assert (first.stdout, first.exit_code) == ("2:one\n4:two\n", 0)
    assert "session talk (new)" in first.stderr
    again = pagein("chat", "m", "-s", "talk", input="three\n/exit\nnever said\n")
    assert again.stdout == "6:three\n"
    assert "5 messages" in again.stderr
    roles = [role for role, _ in messages(gateway.worker)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


def test_resume_takes_the_last_one_and_shows_its_end(pagein, gateway):
    """--resume without a name goes on with the session used last, with another model too, and says so."""
    pagein("chat", "m", "-s", "old", input="first\n")
    pagein("chat", "m", "-s", "new", input="second\n")
    result = pagein("chat", "other", "--resume", input="third\n")
    assert result.stdout == "3:third\n"
    assert "session new" in result.stderr
    assert "last with m: other reads all of it anew" in result.stderr
    assert "user: second\nassistant: 1:second" in result.stderr


def test_history_is_shown_on_demand(pagein, gateway):
    """/history prints what was said so far."""
    result = pagein("chat", "m", "-s", "talk", input="one\n/history\n")
    assert "user: one\nassistant: 1:one" in result.stderr


def test_without_a_name_each_talk_is_new(pagein, gateway):
    """Two talks without a name do not see each other."""
    assert pagein("chat", "m", input="one\n").stdout == "1:one\n"
    assert pagein("chat", "m", input="two\n").stdout == "1:two\n"
    assert len(json.loads(pagein("state", "ls", "--json").stdout)["conversations"]) == 2


def test_what_cannot_go_on(pagein, gateway):
    """There is nothing to resume, and a system message comes too late, each with its exit code."""
    assert pagein("chat", "m", "--resume", input="x\n").exit_code == 4
    assert pagein("chat", "m", "--resume", "-s", "none", input="x\n").exit_code == 4
    pagein("chat", "m", "-s", "talk", input="one\n")
    late = pagein("chat", "m", "-s", "talk", "--system", "Be long", input="two\n")
    assert (late.exit_code, "has begun already" in late.stderr) == (2, True)
    unknown = pagein("chat", "nobody", input="x\n")
    assert (unknown.exit_code, "nobody" in unknown.stderr) == (4, True)


@pytest.mark.parametrize(
    ("model", "code", "words"), [("othr", 4, "did you mean 'other'?"), ("ear", 1, "cannot do chat")]
)
def test_a_model_that_cannot_talk_is_told_before_the_first_word(pagein, gateway, model, code, words):
    """Nobody types a message to a name that was misspelt, or to a model that only hears."""
    gateway.desk.models["ear"] = [Capability.TRANSCRIPTION]
    result = pagein("chat", model, input="")
    assert (result.exit_code, words in result.stderr, "session" in result.stderr) == (code, True, False)


@pytest.mark.parametrize("gateway", ["off"], indirect=True)
def test_switched_off(pagein, gateway):
    """Where conversations are not kept, chat and state say so instead of forgetting."""
    assert "switched off" in pagein("chat", "m", input="x\n").stderr
    assert "switched off" in pagein("state", "ls").stderr
