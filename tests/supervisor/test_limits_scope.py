"""A delegated scope from systemd, asked through a busctl that the tests put on the PATH."""

from __future__ import annotations

import os
import sys

import pytest
from tests.fake_cgroups import FakeCgroups

from pagein.config.schema import LimitMode
from pagein.supervisor.limits import find_limiter, foresee, ways
from pagein.supervisor.limits.scope import command

ME = os.getpid()
WORKER = 2**22 + 7
"""No process of this machine: the highest number is below."""
AUTO = LimitMode.AUTO


@pytest.fixture
def user(monkeypatch):
    """A user with a session, not root, whatever runs the tests."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")


@pytest.fixture
def v2(tmp_path):
    """A v2 machine under systemd; its daemon runs in a service of its own."""
    files = FakeCgroups(tmp_path / "machine", 2)
    files.at("/app/pagein.service", ME)
    files.live_in("/app/pagein.service")
    (files.root / "run/systemd/system").mkdir(parents=True)
    return files


@pytest.fixture
def shell(v2):
    """The same, with the daemon in a group that it shares with a shell."""
    v2.at("/app/vte.scope", ME, WORKER)
    v2.live_in("/app/vte.scope")
    return v2


@pytest.fixture
def busctl(tmp_path, monkeypatch):
    """Put a busctl on the PATH that runs the given Python and writes down how it was called."""

    def make(code):
        program, log = tmp_path / "bin/busctl", tmp_path / "busctl.log"
        program.parent.mkdir()
        program.write_text(
            f"#!{sys.executable} -S\nimport sys\nopen({str(log)!r}, 'w').write('|'.join(sys.argv[1:]))\n{code}"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return log

    return make


def test_the_call_is_the_one_that_busctl_takes():
    """Signature, name, mode, four properties with type and value, no auxiliary units; no password is asked for."""
    line = command("pagein-7.scope", 7, root=False)
    assert line[:2] == ["busctl", "--user"]
    assert "--allow-interactive-authorization=false" in line
    assert " ".join(line[line.index("call") :]) == (
        "call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager "
        "StartTransientUnit ssa(sv)a(sa(sv)) pagein-7.scope fail 4 "
        "Description s Pagein and its workers PIDs au 1 7 Delegate b true CollectMode s inactive-or-failed 0"
    )
    assert command("pagein-7.scope", 7, root=True)[1] == "--system"


def test_systemd_gives_a_scope(shell, user, tmp_path, busctl):
    """A daemon in a shell's group is moved into a delegated scope, which is divided then."""
    scope = shell.at(f"/app/pagein-{ME}.scope", ME)
    log = busctl(f"open({str(shell.root / 'proc/self/cgroup')!r}, 'w').write('0::/app/pagein-{ME}.scope')")
    limiter = find_limiter(AUTO, tmp_path, shell)
    assert limiter.describe() == f"each worker in a cgroup of its own (v2, below /app/pagein-{ME}.scope)"
    assert shell.pids(scope / "daemon") == [ME]
    assert f"|PIDs|au|1|{ME}|" in log.read_text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit('Call failed: Access denied')", "systemd gave no scope: Call failed: Access denied"),
        ("sys.exit(3)", "systemd gave no scope: exit code 3"),
        ("", f"systemd did not move this process into pagein-{ME}.scope"),
    ],
    ids=["denied", "failed", "not moved"],
)
def test_systemd_gives_none(shell, user, tmp_path, busctl, monkeypatch, code, words):
    """Its refusal is passed on, and a job that it does not carry out is not waited for without end."""
    monkeypatch.setattr("pagein.supervisor.limits.scope._MOVE", 0.02)
    busctl(code)
    limiter = find_limiter(AUTO, tmp_path, shell)
    assert not limiter.hard
    assert words in limiter.describe()


def test_a_service_is_not_taken_out_of_its_unit(v2, user, tmp_path, busctl):
    """A unit that lost its main process could not stop it any more; its file needs one line."""
    v2.at("/app/pagein.service", ME, WORKER)
    log = busctl("")
    assert "pagein.service has no Delegate=yes" in find_limiter(AUTO, tmp_path, v2).describe()
    assert not log.exists()


def test_without_busctl_nobody_is_asked(shell, user, tmp_path, monkeypatch):
    """The reason names the program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "busctl, to ask systemd for a scope, is not installed" in find_limiter(AUTO, tmp_path, shell).describe()


def test_without_a_session_nobody_is_asked(shell, user, tmp_path, busctl, monkeypatch):
    """After su or in cron there is no bus; the reason names the variable."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    log = busctl("")
    assert "XDG_RUNTIME_DIR is not set" in find_limiter(AUTO, tmp_path, shell).describe()
    assert not log.exists()


def test_root_divides_only_what_systemd_says_it_delegated(v2, tmp_path, monkeypatch):
    """Root may write everywhere; systemd marks what it gave away."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(ways, "_marked", lambda group: False)
    assert "a service needs Delegate=yes" in find_limiter(AUTO, tmp_path, v2).describe()
    assert v2.written == []
    monkeypatch.setattr(ways, "_marked", lambda group: group.name == "pagein.service")
    assert find_limiter(AUTO, tmp_path, v2).hard


def test_looking_ahead_tells_of_a_scope(shell, user, busctl):
    """Asking systemd is left to the daemon."""
    log = busctl("")
    assert "a scope that systemd makes for this user" in foresee(files=shell).words
    assert not log.exists()
