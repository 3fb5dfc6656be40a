"""A module that measures in a process of its own: what it says, and how its end is told."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from pagein.cli.child import events, need_torch
from pagein.errors import ContextTooLong, EngineMissing, PageinError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that makes a module of some lines and returns its name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def make(*lines: str) -> str:
        (tmp_path / "measured_here.py").write_text("import sys\n" + "\n".join(lines) + "\n")
        return "measured_here"

    return make


def test_lines_of_json_are_events_and_all_else_is_noise(module):
    """Libraries print what they like; arguments arrive."""
    name = module('print(\'loading\'); print(\'{"event": "ran", "got": "%s"}\' % sys.argv[1])')
    assert list(events(name, ["x"], "it")) == [{"event": "ran", "got": "x"}]


def test_an_error_is_raised_as_its_own_class(module):
    """With its code, so that the exit code is that of the error."""
    error = json.dumps({"event": "error", "code": ContextTooLong.code, "message": "m", "hint": "h"})
    name = module(f"print({error!r})")
    with pytest.raises(ContextTooLong, match="m") as caught:
        list(events(name, [], "it"))
    assert caught.value.hint == "h"


def test_an_end_without_a_word_has_the_last_line_of_its_errors(module):
    """What broke stands in the message, not in a traceback above it."""
    name = module("print('{\"event\": \"progress\"}', flush=True); raise SystemExit('no such model')")
    found = events(name, [], "measuring")
    assert next(found)["event"] == "progress"
    with pytest.raises(PageinError, match="measuring ended with exit code 1: no such model"):
        next(found)


def test_what_is_no_longer_read_is_ended(module):
    """Ctrl-C leaves no process behind: the reader's end is the module's end."""
    name = module(
        "import time",
        'print(\'{"event": "progress", "pid": %d}\' % __import__(\'os\').getpid(), flush=True)',
        "time.sleep(600)",
    )
    found = events(name, [], "it")
    pid = next(found)["pid"]
    found.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_torch_is_asked_for_before_anything_runs(monkeypatch):
    """The error is the install line."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="bench kv needs torch") as caught:
        need_torch("bench kv")
    assert caught.value.hint == "pip install 'pagein[torch]'"
