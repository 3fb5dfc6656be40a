"""How a process ended, in words."""

import pytest

from pagein.exits import describe_exit, explain_exit, signal_name


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-11, "was ended by SIGSEGV"),
     (-99, "was ended by signal 99")],
)  # fmt: skip
def test_codes_and_signals_are_told_apart(returncode, words):
    """A signal is named, also one that Python does not know."""
    assert describe_exit(returncode) == words


def test_what_a_signal_usually_means_is_added_only_for_an_end_that_nobody_asked_for():
    """Our own SIGKILL is no sign of too little memory."""
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert "out of memory" in explain_exit(-9)
    assert "another CPU" in explain_exit(-4)
    assert explain_exit(-11) == "was ended by SIGSEGV"


def test_an_exit_code_is_no_signal():
    """Only negative return codes are."""
    assert signal_name(9) is None
    assert signal_name(-9) == "SIGKILL"
