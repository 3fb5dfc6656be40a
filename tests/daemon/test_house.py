"""One daemon per state folder."""

import json
import stat

import pytest

from pagein.daemon.house import House
from pagein.errors import AlreadyRunning


def test_a_second_daemon_is_refused_with_the_first_one_s_address(tmp_path):
    """Two managers never own the same processes (row G11)."""
    with House(tmp_path) as first:
        first.publish("http://127.0.0.1:7311")
        with pytest.raises(AlreadyRunning, match=r"process \d+ at http://127.0.0.1:7311"), House(tmp_path):
            pass
    with House(tmp_path) as again:
        assert not (tmp_path / "daemon.json").exists()
        again.publish("http://127.0.0.1:1")


def test_the_folder_and_the_address_are_the_owner_s_alone(tmp_path):
    """State, sockets and address are readable by the owner only, and gone afterwards."""
    state = tmp_path / "state"
    with House(state) as house:
        house.publish("http://127.0.0.1:7311")
        run_dir = house.run_dir
        for path in (state, run_dir):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((state / "daemon.json").stat().st_mode) == 0o600
        assert json.loads((state / "daemon.json").read_text())["address"] == "http://127.0.0.1:7311"
        assert len(str(run_dir / "abcdef01" / "w.sock")) < 100
    assert not run_dir.exists()
