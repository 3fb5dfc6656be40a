"""The command table, help, errors and exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagein import __version__
from pagein.cli.app import COMMANDS, build
from pagein.cli.help import describe


def test_help_lists_every_command(pagein):
    """The overview names each command with its summary."""
    result = pagein("--help")
    assert result.exit_code == 0
    for name, entry in COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert entry.summary in result.stdout


def test_no_arguments_print_the_help(pagein):
    """Without arguments the overview is printed, and that is no error."""
    assert pagein().stdout == pagein("--help").stdout
    assert pagein().exit_code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_docstring(name):
    """The table's summary is the first line of the command's docstring."""
    assert describe(build(name))[0] == COMMANDS[name].summary


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(pagein, name):
    """Each command's page shows its usage, its summary and every option with a meaning."""
    result = pagein(name, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"usage: pagein {name}")
    assert COMMANDS[name].summary in result.stdout
    for parameter in build(name).params:
        assert parameter.help, parameter.name


def test_help_imports_no_command():
    """Listing the commands imports neither a command's file nor what only commands need."""
    code = (
        "import sys\nfrom pagein.cli.app import app\n"
        "try:\n    app(['--help'], prog_name='pagein')\nexcept SystemExit:\n    pass\n"
        "heavy = {'aiohttp', 'pydantic', 'yaml', 'pagein.cli.ps'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_unknown_command_suggests_the_nearest(pagein):
    """A misspelt command is refused with exit code 2 and the nearest known one."""
    result = pagein("explian")
    assert result.exit_code == 2
    assert result.stderr == "error: there is no command 'explian'\nhint: did you mean 'pagein explain'?\n"
    assert result.stdout == ""


def test_unknown_command_without_a_neighbour(pagein):
    """Where nothing is near, the hint names the help."""
    assert pagein("zzzz").stderr.endswith("hint: see 'pagein --help'\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ps", "--jsn"), "no such option: --jsn"),
        (("plan",), "MODEL"),
        (("logs", "chat", "-n", "many"), "--lines"),
        (("logs", "chat", "-n", "0"), "--lines"),
    ],
)
def test_wrong_arguments(pagein, arguments, words):
    """A wrong argument is one readable line that names it, a hint to the help, and exit code 2."""
    result = pagein(*arguments)
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint == f"hint: see 'pagein {arguments[0]} --help'"


def test_unexpected_exception_has_no_traceback(pagein, monkeypatch):
    """A fault of Pagein itself is one line too, with the way to its traceback."""
    monkeypatch.setattr("pagein.cli.version.platform.python_version", lambda: 1 / 0)
    result = pagein("version")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ZeroDivisionError: division by zero\nhint: set PAGEIN_DEBUG=1")
    assert "Traceback" not in result.output


def test_system_error_is_no_fault_of_ours(pagein, monkeypatch):
    """What the system refuses is one line that names the file, without a call to report it."""

    def full() -> str:
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr("pagein.cli.version.platform.python_version", full)
    result = pagein("version")
    assert result.exit_code == 1
    assert result.stderr == "error: /tmp/x: No space left on device\n"


def test_debug_shows_the_traceback(pagein, monkeypatch):
    """With PAGEIN_DEBUG=1 the exception itself leaves."""
    monkeypatch.setattr("pagein.cli.version.platform.python_version", lambda: 1 / 0)
    monkeypatch.setenv("PAGEIN_DEBUG", "1")
    assert isinstance(pagein("version").exception, ZeroDivisionError)


def test_interrupt_exits_130(pagein, monkeypatch):
    """Ctrl-C ends with 130 and without a traceback."""

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagein.cli.version.platform.python_version", interrupted)
    result = pagein("version")
    assert result.exit_code == 130
    assert result.stderr.strip() == ""


def test_version(pagein):
    """The version is printed by the command and by the option."""
    assert pagein("version").stdout.startswith(f"pagein {__version__} ")
    assert pagein("--version").stdout == f"pagein {__version__}\n"
    assert f'"pagein": "{__version__}"' in pagein("version", "--json").stdout
