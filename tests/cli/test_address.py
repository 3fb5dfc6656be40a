"""Finding the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pagein.cli.address import find_daemon
from pagein.errors import BadUsage, DaemonUnreachable


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def environ(tmp_path):
    return {"PAGEIN_STATE_DIR": str(tmp_path / "none")}


def remember(folder, pid=None, address="http://127.0.0.1:4321"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "daemon.json").write_text(json.dumps({"pid": pid or os.getpid(), "address": address}))


def gone() -> int:
    """Return the id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_given_url_wins(tmp_path, environ):
    """--url wins over the environment and over the state folder."""
    remember(tmp_path / "none")
    assert find_daemon("http://a:1/", None, environ | {"PAGEIN_URL": "http://b:2"}).url == "http://a:1"


def test_environment_wins_over_state_folder(tmp_path, environ):
    """$PAGEIN_URL wins over the state folder, and may lack the scheme."""
    remember(tmp_path / "none")
    assert find_daemon(None, None, environ | {"PAGEIN_URL": "b:2"}).url == "http://b:2"


def test_other_schemes_are_refused(environ):
    """What is no HTTP address is refused with the way to write one."""
    with pytest.raises(BadUsage, match="ftp://x"):
        find_daemon("ftp://x", None, environ)


def test_address_file_of_the_given_folder(tmp_path, environ):
    """--state-dir names the folder whose daemon.json is read, and the source says so."""
    remember(tmp_path / "state")
    found = find_daemon(None, tmp_path / "state", environ)
    assert found.url == "http://127.0.0.1:4321"
    assert found.source == str(tmp_path / "state" / "daemon.json")


@pytest.mark.parametrize("ended", [True, False])
def test_a_given_folder_without_a_daemon_leads_to_no_other(tmp_path, environ, ended):
    """Whoever names a folder means its daemon: the one at the default address may be somebody else's."""
    if ended:
        remember(tmp_path / "state", pid=gone())
    with pytest.raises(DaemonUnreachable, match=r"no daemon of .*state runs") as refused:
        find_daemon(None, tmp_path / "state", environ)
    assert "--url" in (refused.value.hint or "")


def test_state_dir_of_the_configuration(tmp_path):
    """The state_dir of ./pagein.yaml is read relative to it, even when the rest of the file is wrong."""
    remember(tmp_path / "here")
    (tmp_path / "pagein.yaml").write_text("state_dir: here\nbudgte: 6 gigs\n")
    assert find_daemon(None, None, {}).url == "http://127.0.0.1:4321"


def test_state_dir_of_the_named_configuration(tmp_path):
    """$PAGEIN_CONFIG takes the place of ./pagein.yaml."""
    remember(tmp_path / "etc" / "state")
    (tmp_path / "etc" / "my.yaml").write_text("state_dir: state\n")
    environ = {"PAGEIN_CONFIG": str(tmp_path / "etc" / "my.yaml")}
    assert find_daemon(None, None, environ).url == "http://127.0.0.1:4321"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x", "address": 1}', '{"pid": 1e99, "address": "a:1"}'])
def test_unreadable_address_file_is_passed_over(tmp_path, environ, text):
    """A damaged daemon.json leads to the default address, not to a crash."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "daemon.json").write_text(text)
    assert find_daemon(None, None, environ).url == "http://127.0.0.1:7311"


def test_address_of_a_dead_daemon_is_passed_over(tmp_path, environ):
    """A daemon.json whose process is gone is not used."""
    remember(tmp_path / "none", pid=gone())
    assert find_daemon(None, None, environ).url == "http://127.0.0.1:7311"


def test_key_comes_from_the_environment(environ):
    """The API key is that of the daemon's own variable."""
    assert find_daemon(None, None, environ | {"PAGEIN_SERVER__API_KEY": "sesame123"}).key == "sesame123"
    assert find_daemon(None, None, environ).key is None
