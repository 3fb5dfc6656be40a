"""serve: which configuration, with which overrides, and what the daemon's end means."""

from __future__ import annotations

import pytest

from pagein.cli.overrides import overridden
from pagein.errors import BadUsage, ConfigError


@pytest.fixture
def started(monkeypatch):
    """Take the daemon's place: remember the settings that it is started with, and end with 0."""
    seen = []

    def serve(settings, **more):
        seen.append(settings)
        return 0

    monkeypatch.setattr("pagein.daemon.run.serve", serve)
    return seen


def test_default_configuration(pagein, started, tmp_path):
    """Without an argument ./pagein.yaml is served."""
    (tmp_path / "pagein.yaml").write_text("server: {port: 4000}\n")
    assert pagein("serve").exit_code == 0
    assert started[0].server.port == 4000


def test_named_configuration(pagein, started, tmp_path, monkeypatch):
    """$PAGEIN_CONFIG names another file, and the argument wins over it."""
    (tmp_path / "a.yaml").write_text("server: {port: 1111}\n")
    (tmp_path / "b.yaml").write_text("server: {port: 2222}\n")
    monkeypatch.setenv("PAGEIN_CONFIG", "a.yaml")
    pagein("serve")
    pagein("serve", "b.yaml")
    assert [settings.server.port for settings in started] == [1111, 2222]


def test_options_win(pagein, started, tmp_path, monkeypatch):
    """Options win over the environment, which wins over the file."""
    (tmp_path / "pagein.yaml").write_text("server: {port: 1111}\nbudget: 1GiB\n")
    monkeypatch.setenv("PAGEIN_SERVER__PORT", "2222")
    monkeypatch.setenv("PAGEIN_BUDGET", "2GiB")
    options = ("--port", "3333", "--host", "localhost", "--budget", "3GiB", "--budget", "cuda:0=50%")
    assert pagein("serve", *options).exit_code == 0
    settings = started[0]
    assert (settings.server.host, settings.server.port) == ("localhost", 3333)
    assert settings.budget == {"ram": 3 * 1024**3, "cuda:0": 0.5}


def test_exit_code_of_the_daemon(pagein, tmp_path, monkeypatch):
    """serve ends with the code that the daemon ended with."""
    (tmp_path / "pagein.yaml").write_text("budget: 1GiB\n")
    monkeypatch.setattr("pagein.daemon.run.serve", lambda settings, **more: 7)
    assert pagein("serve").exit_code == 7


def test_the_daemon_can_read_it_again(pagein, tmp_path, monkeypatch):
    """What it reads again is the file as it is then, with the options and the environment of the start."""
    calls = []
    monkeypatch.setattr("pagein.daemon.run.serve", lambda settings, **more: calls.append(more) or 0)
    file = tmp_path / "pagein.yaml"
    file.write_text("server: {port: 1111}\nscheduler: {patience: 20s}\n")
    monkeypatch.setenv("PAGEIN_SUPERVISOR__GRACE", "1s")
    assert pagein("serve", "--port", "3333", "--watch").exit_code == 0
    assert pagein("serve").exit_code == 0
    monkeypatch.delenv("PAGEIN_SUPERVISOR__GRACE")
    assert [(more["path"], more["watch"]) for more in calls] == [(file, True), (file, False)]
    file.write_text("server: {port: 2222}\nscheduler: {patience: 40s}\n")
    again = calls[0]["reread"]()
    assert (again.server.port, again.scheduler.patience, again.supervisor.grace) == (3333, 40.0, 1.0)
    file.write_text("servr: {}\n")
    with pytest.raises(ConfigError, match="did you mean server"):
        calls[0]["reread"]()


def test_missing_configuration(pagein, started):
    """A missing file is named, with the way to write one, and exit code 2."""
    result = pagein("serve")
    assert result.exit_code == 2
    assert "pagein.yaml" in result.stderr
    assert "pagein init" in result.stderr
    assert started == []


def test_wrong_configuration(pagein, started, tmp_path):
    """Every fault of the file is listed with its line; nothing is started."""
    (tmp_path / "pagein.yaml").write_text("budgte: 1GiB\nserver: {port: high}\n")
    result = pagein("serve")
    assert result.exit_code == 2
    assert "budgte" in result.stderr
    assert "server.port" in result.stderr
    assert started == []


@pytest.mark.parametrize("size", ["lots", "-1", "ram=", "120%"])
def test_wrong_budget(size):
    """A budget that is no size is refused by the option's name."""
    with pytest.raises(BadUsage, match="--budget"):
        overridden({}, budget=[size])
