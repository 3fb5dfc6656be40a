"""doctor: findings on memory and engines, as lines and as JSON."""

from __future__ import annotations

import json
import sys

import pytest

from pagein.memory.probes.advice import Finding, Verdict
from pagein.supervisor.limits import Prospect


@pytest.fixture
def memory(monkeypatch):
    """Take the probes' place with findings that the test may add to."""
    findings = [Finding("memory", "8.0 GiB", "the default budget is 90 %: 7.2 GiB")]
    monkeypatch.setattr("pagein.cli.doctor.diagnose", lambda: findings)
    return findings


def installed(monkeypatch, **versions):
    """Let these engines be installed, and no llama-server be on the PATH."""
    monkeypatch.setattr("pagein.cli.doctor.installed_version", lambda row: versions.get(row.name))
    monkeypatch.setattr("pagein.cli.doctor.find_llama_server", lambda options: None)


def line(result, topic):
    """Return the one line of the report about a topic."""
    (found,) = [line for line in result.stdout.splitlines() if f"  {topic}  " in f"{line}  "]
    return found


def test_each_line_says_what_it_means(pagein, memory, monkeypatch):
    """Each finding is a line with its verdict, what was found and what that means."""
    installed(monkeypatch, onnx="onnxruntime 1.2", command="command")
    memory.append(Finding("swap", "used", "slow", Verdict.WARN))
    result = pagein("doctor")
    assert result.exit_code == 0
    assert " ".join(line(result, "memory").split()) == "ok memory 8.0 GiB the default budget is 90 %: 7.2 GiB"
    assert line(result, "swap").startswith("warn")
    assert line(result, "engine onnx").endswith("loads onnx, ort")


def test_missing_engine_says_how_to_install(pagein, memory, monkeypatch):
    """An engine that is not installed is a warning with the command that installs it."""
    installed(monkeypatch, onnx="onnxruntime 1.2", command="command")
    found = line(pagein("doctor"), "engine llama_cpp")
    assert found.startswith("warn")
    assert "not installed" in found
    assert found.endswith("pip install 'pagein[llamacpp]'")


def test_llama_server_on_the_path(pagein, memory, monkeypatch, tmp_path):
    """A llama-server on the PATH is named, since it is used instead of the library."""
    installed(monkeypatch, command="command")
    monkeypatch.setattr("pagein.cli.doctor.find_llama_server", lambda options: tmp_path / "llama-server")
    found = line(pagein("doctor"), "engine llama_cpp")
    assert found.startswith("ok")
    assert str(tmp_path / "llama-server") in found


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize(("hard", "verdict"), [(True, "ok"), (False, "warn")])
def test_what_limits_workers(pagein, memory, monkeypatch, hard, verdict):
    """The place of the workers' cgroups is told, or why there is none and what to do."""
    monkeypatch.setattr("pagein.cli.doctor.foresee", lambda: Prospect(hard, "such and such"))
    found = line(pagein("doctor"), "worker limits")
    assert found.startswith(verdict)
    assert "such and such" in found
    assert ("Delegate=yes" in found) is not hard


def test_no_engine_is_bad(pagein, memory, monkeypatch):
    """Without any engine the report says so and ends with 1."""
    installed(monkeypatch, command="command")
    result = pagein("doctor")
    assert result.exit_code == 1
    assert line(result, "engines").startswith("bad")


def test_bad_memory_ends_with_1(pagein, memory, monkeypatch):
    """A finding that will go wrong ends with 1, with --json too."""
    installed(monkeypatch, onnx="onnxruntime 1.2", command="command")
    memory.append(Finding("open files", "limit 64", "connections fail", Verdict.BAD))
    assert pagein("doctor").exit_code == 1
    result = pagein("doctor", "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert findings[0] == {
        "topic": "memory",
        "finding": "8.0 GiB",
        "meaning": "the default budget is 90 %: 7.2 GiB",
        "verdict": "ok",
    }
    assert {finding["topic"] for finding in findings} >= {"open files", "engine llama_cpp", "engine command"}


def test_this_machine(pagein):
    """On the machine at hand the report has memory and every known engine."""
    result = pagein("doctor")
    assert result.exit_code in (0, 1)
    assert line(result, "memory")
    for name in ("llama_cpp", "onnx", "whisper", "command"):
        assert line(result, f"engine {name}")
