"""Errors for people from the ways in which workers fail."""

from pagein.errors import BadModelFile, EngineMissing, LoadFailed
from pagein.protocol import Failed
from pagein.supervisor.faults import death_error, load_error, reported_error


def test_the_kind_and_hint_of_a_reported_error_are_kept():
    """EngineMissing in the worker is EngineMissing in the daemon, with its exit code and hint."""
    error = reported_error("m", Failed("t", "no onnxruntime", "engine_missing", "pip install it"), [])
    assert isinstance(error, EngineMissing)
    assert (error.hint, error.message) == ("pip install it", "model 'm' could not be loaded: no onnxruntime")
    assert isinstance(reported_error("m", Failed("t", "x", "bad_model_file"), []), BadModelFile)


def test_an_unknown_kind_is_a_failed_load():
    """A third-party engine's own code does not break the daemon."""
    assert type(reported_error("m", Failed("t", "x", "queue_full"), [])) is LoadFailed


def test_a_model_that_is_named_is_not_named_twice():
    """The message stays one sentence."""
    assert reported_error("m", Failed("t", "model 'm': no option 'x'"), []).message == "model 'm': no option 'x'"


def test_the_last_lines_end_the_message():
    """The reason an engine printed is in the error that the client sees, and in its details."""
    error = load_error("m", "its worker ended with exit code 1", ["a", "b"], returncode=1)
    assert error.message.endswith("exit code 1\nlast output:\n  a\n  b")
    assert error.details == {"model": "m", "log": ["a", "b"], "exit_code": 1, "signal": None}


def test_what_a_signal_means_is_said():
    """SIGILL tells of the wrong CPU, SIGKILL of memory."""
    assert "another CPU" in death_error("m", -4, None, []).message
    assert "memory" in death_error("m", -9, None, []).message
    assert death_error("m", 1, None, []).message == "model 'm' ended: its worker ended with exit code 1"


def test_an_unknown_end_is_called_unknown():
    """An adopted worker's exit code goes to another parent; none is made up."""
    error = death_error("m", None, None, [])
    assert error.message == (
        "model 'm' ended: its worker ended; it was adopted, and the system tells how a process ended to its parent only"
    )
    assert error.details == {"model": "m", "log": []}


def test_the_worker_s_last_words_explain_more_than_its_exit_code():
    """When the server program died, its end is the reason, not the worker's own."""
    assert death_error("m", 1, "llama-server was ended by SIGSEGV", []).message == (
        "model 'm' ended: llama-server was ended by SIGSEGV"
    )
