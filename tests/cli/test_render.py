"""The reference page of the command line."""

from __future__ import annotations

from pathlib import Path

from pagein.cli.app import COMMANDS
from pagein.cli.render import REFERENCE_FILE, main, render_reference

ROOT = Path(__file__).parents[2]


def test_page_is_current():
    """The page in the repository is what the commands render."""
    assert (ROOT / REFERENCE_FILE).read_text(encoding="utf-8") == render_reference()


def test_page_has_every_command_and_exit_code():
    """Each command has a heading; exit codes are listed with their meaning."""
    page = render_reference()
    for name in COMMANDS:
        assert f"### `pagein {name}" in page
    assert "| 8 | No daemon answers at the address |" in page
    assert "| 130 | ended by Ctrl-C |" in page


def test_check_writes_nothing(tmp_path, capsys):
    """--check reports a stale page and leaves it; without it the page is written once."""
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "not current" in capsys.readouterr().err
    assert not (tmp_path / REFERENCE_FILE).exists()
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
