"""The live view of top, in a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from pagein.gateway.ports import Decision

LONGEST = 60.0
"""Seconds after which a wait is given up, also one for words in a screen that keeps changing without them."""


class Terminal:
    """A command in a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        self.screen, child = pty.openpty()
        self.output = b""
        code = "from pagein.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=child, stdout=child, stderr=child,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
            start_new_session=True,
        )  # fmt: skip
        os.close(child)

    def read_until(self, words: bytes) -> None:
        """Read until the words were printed; fails when the command ends, or does not print them within `LONGEST`."""
        ends = time.monotonic() + LONGEST
        while words not in self.output:
            assert self._has_more(ends), self.output
            self.output += os.read(self.screen, 65536)

    def finish(self) -> int:
        """Read to the end and return the exit code."""
        ends = time.monotonic() + LONGEST
        try:
            while self._has_more(ends) and (more := os.read(self.screen, 65536)):
                self.output += more
        except OSError:  # how Linux says that the other end is closed
            pass
        return self.process.wait(LONGEST)

    def _has_more(self, ends: float) -> bool:
        return bool(select.select([self.screen], [], [], max(0.0, ends - time.monotonic()))[0])


@pytest.fixture
def terminal(daemon):
    """Start top in a terminal; it is ended whatever happens."""
    started = Terminal("top", "--every", "0.1")
    yield started
    started.process.kill()
    started.process.wait()
    os.close(started.screen)


def test_top_is_live_until_q(terminal, daemon):
    """top fills the screen, shows a decision that arrives, and gives the terminal back at q."""
    terminal.read_until(b"speech-moonshine-tiny-en")
    assert b"brand new" not in terminal.output
    daemon.live = [Decision(99, 0.0, "note", "vit", "brand new")]
    terminal.read_until(b"brand new")
    os.write(terminal.screen, b"q")
    assert terminal.finish() == 0
    assert b"\x1b[?1049h" in terminal.output  # the alternate screen, entered and left
    assert b"\x1b[?1049l" in terminal.output
    assert b"\x1b[?25h" in terminal.output  # the cursor is back
    assert b"Traceback" not in terminal.output


def test_top_ends_at_ctrl_c(terminal):
    """Ctrl-C ends top with 130 and gives the terminal back."""
    terminal.read_until(b"speech-moonshine-tiny-en")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 130
    assert b"\x1b[?1049l" in terminal.output
    assert b"Traceback" not in terminal.output


def test_top_survives_a_silent_daemon(terminal, daemon):
    """When the daemon goes, top says so and goes on asking."""
    terminal.read_until(b"speech-moonshine-tiny-en")
    daemon.refuse = True
    terminal.read_until(b"does not answer, trying again")
    daemon.refuse = False
    terminal.output = b""
    terminal.read_until(b"running, up")
    os.write(terminal.screen, b"q")
    assert terminal.finish() == 0
