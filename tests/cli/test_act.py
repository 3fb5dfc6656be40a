"""load, unload, pin, unpin and logs."""

from __future__ import annotations

import json

import pytest

from pagein.cli.logs import added, whole_lines
from pagein.errors import LoadFailed


def test_load_says_what_it_took(pagein, daemon):
    """load waits for the daemon, then says what the model holds, how long it took and who left for it."""
    result = pagein("load", "vit")
    assert result.stdout == "vit is resident; holds 210 MiB; loaded in 500 ms; evicted for it: chat\n"
    assert daemon.seen == [("load", "vit")]


def test_load_json(pagein, daemon):
    """--json has the model as it stands and who was evicted."""
    body = json.loads(pagein("load", "vit", "--json").stdout)
    assert body["model"]["state"] == "resident"
    assert body["evicted"] == ["chat"]


def test_old_evictions_are_not_blamed(pagein, daemon):
    """An eviction for the same model that happened before is not reported again."""
    assert "evicted" not in pagein("pin", "embed").stdout


@pytest.mark.parametrize(
    ("command", "model", "words"),
    [
        ("unload", "chat", "chat is absent\n"),
        ("pin", "vit", "vit is absent and pinned\n"),
        ("unpin", "chat", "chat is resident and not pinned; holds 512 MiB\n"),
    ],
)
def test_acts(pagein, daemon, command, model, words):
    """Each act reaches the daemon once and says how the model stands afterwards."""
    assert pagein(command, model).stdout == words
    assert daemon.seen == [(command, model)]


@pytest.mark.parametrize("command", ["load", "unload", "pin", "unpin", "logs"])
def test_acts_without_a_daemon(pagein, nowhere, command):
    """Without a daemon every act ends with exit code 8."""
    assert pagein(command, "chat").exit_code == 8


def test_failed_load(pagein, daemon):
    """A failed load ends with its exit code; the log lines in its message keep their lines."""
    daemon.fail = LoadFailed("the worker died: exit status 1\n  cannot open x.gguf")
    result = pagein("load", "chat")
    assert result.exit_code == 7
    assert result.stderr.startswith("error: the worker died: exit status 1\n  cannot open x.gguf\n")


def test_model_names_are_quoted(pagein, daemon):
    """A name with a slash stays one part of the path, and is refused by the daemon as unknown."""
    assert pagein("load", "../status").exit_code == 4


def test_logs(pagein, daemon):
    """logs prints the last lines, of which -n says how many."""
    assert pagein("logs", "chat").stdout == "line 1\nline 2\nline 3\n"
    assert pagein("logs", "chat", "-n", "1").stdout == "line 3\n"
    assert json.loads(pagein("logs", "chat", "--json").stdout) == {
        "model": "chat",
        "lines": ["line 1", "line 2", "line 3"],
    }


def test_logs_cannot_drive_the_terminal(pagein, daemon):
    """Control characters in a log are not passed on."""
    daemon.log = "a\x1b[2Jb\x07\tc\n"
    assert pagein("logs", "chat").stdout == "a[2Jb\tc\n"


def test_follow_prints_what_is_added(pagein, daemon, monkeypatch):
    """logs -f prints the end, then each added line once, until Ctrl-C ends it with 130."""
    daemon.logs = ["a\nb\nc\n", "a\nb\nc\nd\nhal", "b\nc\nd\nhalf\n"]

    async def at_once(seconds: float) -> None:
        if not daemon.logs:
            raise KeyboardInterrupt

    monkeypatch.setattr("pagein.cli.logs.sleep", at_once)
    result = pagein("logs", "chat", "-f", "-n", "2")
    assert result.stdout == "b\nc\nd\nhalf\n"
    assert result.exit_code == 130


def test_added_lines():
    """What is new is what follows the longest overlap of the two windows; a new file is all new."""
    assert added([], ["a"]) == ["a"]
    assert added(["a", "b"], ["a", "b"]) == []
    assert added(["a", "b", "b"], ["b", "b", "c"]) == ["c"]
    assert added(["a", "b"], ["x"]) == ["x"]
    assert whole_lines("a\nb") == ["a"]
    assert whole_lines("") == []
