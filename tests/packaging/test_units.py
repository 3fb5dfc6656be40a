"""The units of systemd say what the daemon relies on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pagein.config.environment import read_environment
from pagein.config.schema import Supervisor
from pagein.errors import AlreadyRunning, ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "systemd"
UNITS = ("system", "user")
HIDES = {
    "DeviceAllow",
    "DevicePolicy",
    "MemoryDenyWriteExecute",
    "PrivateDevices",
    "PrivateNetwork",
    "ProcSubset",
    "ProtectClock",
    "ProtectControlGroups",
    "RestrictAddressFamilies",
}
"""What hides GPUs, forbids code compiled while running, or makes cgroups read-only."""


def parse(text: str) -> dict[str, list[str]]:
    """Each key with its values; a key may come several times."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            key, separator, value = line.partition("=")
            assert separator, line
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture(params=UNITS)
def path(request) -> Path:
    """Each unit in turn."""
    return FOLDER / request.param / "pagein.service"


@pytest.fixture
def unit(path: Path) -> dict[str, list[str]]:
    """Its keys."""
    return parse(path.read_text())


def test_the_daemon_is_started_heard_and_reloaded(unit):
    """It tells that it is ready, is watched, and takes SIGHUP."""
    assert (unit["Type"], unit["NotifyAccess"]) == (["notify"], ["main"])
    assert re.fullmatch(r"\S+/pagein serve \S+\.yaml", unit["ExecStart"][0])
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(unit["WatchdogSec"][0]) >= 60


def test_workers_get_groups_and_one_that_dies_takes_nobody_along(unit):
    """Delegation is what makes limits possible without root; an OOM kill inside is no end of the service."""
    assert {"memory", "pids"} <= set(unit["Delegate"][0].split())
    assert unit["OOMPolicy"] == ["continue"]


def test_a_stop_reaches_the_daemon_first_and_waits_long_enough(unit):
    """SIGTERM for the daemon alone, SIGKILL for what is left, after drain, workers and memory had their time."""
    bounds = Supervisor()
    assert unit["KillMode"] == ["mixed"]
    assert int(unit["TimeoutStopSec"][0]) >= 2 * (2 * bounds.grace + bounds.release_timeout)


def test_what_does_not_heal_is_not_tried_again(unit):
    """A wrong configuration and a second daemon end it for good; everything else starts it again, within bounds."""
    assert unit["Restart"] == ["on-failure"]
    codes = {int(code) for code in unit["RestartPreventExitStatus"][0].split()}
    assert codes == {ConfigError.exit_code, AlreadyRunning.exit_code}
    assert int(unit["StartLimitBurst"][0]) > 0


def test_nothing_that_engines_need_is_taken_away(unit):
    """GPUs, compiled code, /proc and cgroups stay reachable."""
    assert HIDES.isdisjoint(unit)


def test_variables_of_the_system_unit_are_settings():
    """A misspelt one would keep the daemon from starting."""
    unit = parse((FOLDER / "system" / "pagein.service").read_text())
    given = dict(value.split("=", 1) for value in unit["Environment"])
    overrides, faults = read_environment(given, [])
    assert faults == []
    assert [override.key for override in overrides] == [("state_dir",)]
    state, run = unit["StateDirectory"][0], unit["RuntimeDirectory"][0]
    assert given["PAGEIN_STATE_DIR"] == f"/var/lib/{state}"
    assert given["XDG_RUNTIME_DIR"] == f"/run/{run}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("kind", UNITS)
def test_systemd_itself_understands_every_line(kind, tmp_path):
    """`systemd-analyze verify` has nothing to say, once the program is one that is there."""
    text = (FOLDER / kind / "pagein.service").read_text()
    copy = tmp_path / "pagein.service"
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    scope = ["--user"] if kind == "user" else []
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *scope, str(copy)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    said = [line for line in (told.stdout + told.stderr).splitlines() if "pagein.service" in line]
    assert (said, told.returncode) == ([], 0)


def test_the_guide_names_the_units_bounds(unit):
    """What the guide says of time-outs and exit codes is what the units have."""
    guide = (ROOT / "docs" / "guides" / "systemd.md").read_text()
    assert f"`TimeoutStopSec` ({unit['TimeoutStopSec'][0]} s)" in guide
    for code in unit["RestartPreventExitStatus"][0].split():
        assert re.search(rf"^\| {code} \|.*leaves it", guide, re.MULTILINE)
