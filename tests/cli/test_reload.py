"""reload: what changed, or every fault."""

from __future__ import annotations

import json
from dataclasses import asdict

from pagein.errors import ConfigError
from pagein.gateway.ports import ReloadView


def test_it_prints_what_changed(pagein, daemon):
    """Each kind of change has a line; what stayed is counted."""
    daemon.reloaded = ReloadView(["a", "b"], ["chat"], ["old"], ["x"], ["scheduler.patience"], ["server.port"])
    assert pagein("reload").stdout.splitlines() == [
        "added: a, b",
        "changed: chat",
        "removed: old",
        "took effect: scheduler.patience",
        "needs a restart: server.port",
        "1 model unchanged",
    ]
    assert json.loads(pagein("reload", "--json").stdout) == asdict(daemon.reloaded)


def test_it_says_that_nothing_changed(pagein, daemon):
    """An unchanged file is no silence."""
    assert pagein("reload").stdout == "nothing changed: 1 model unchanged\n"


def test_a_wrong_file_is_told_in_full(pagein, daemon):
    """Every fault with its line, and the exit code of a wrong configuration."""
    daemon.fail = ConfigError("pagein.yaml: 2 errors\n  line 1: budgte: unknown key\n  line 2: prot: unknown key")
    result = pagein("reload")
    assert result.exit_code == 2
    assert "line 1: budgte" in result.stderr
    assert "line 2: prot" in result.stderr
