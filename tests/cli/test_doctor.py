"""doctor: findings on memory and engines, as lines and as JSON."""

from __future__ import annotations

import json
import sys
from collections import namedtuple

import pytest

from pagein.cli import disk_trial
from pagein.cli.disk_trial import DiskTest
from pagein.cli.doctor_kv import disk_finding, judge
from pagein.errors import DiskFull
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


def test_a_torch_for_gpus_is_told(pagein, memory, monkeypatch):
    """What its libraries cost each process is said with the engines that load it, and with no other."""
    installed(monkeypatch, transformers="torch 2.14", parts="torch 2.14", onnx="onnxruntime 1.2", command="command")
    monkeypatch.setattr("pagein.cli.doctor.torch_for_gpus", lambda: 384 * 1024**2)
    result = pagein("doctor")
    assert line(result, "engine transformers").endswith("each process takes 384 MiB more than with one for CPUs")
    assert "384 MiB" in line(result, "engine parts")
    assert "384 MiB" not in line(result, "engine onnx")


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


MIB = 1024**2
REPORT = {
    "device": {"name": "device", "used": 96 * MIB, "budget": 128 * MIB, "peak": 120 * MIB, "blocks": 60},
    "host": None,
    "disk": {"name": "disk", "used": 2048 * MIB, "budget": 10240 * MIB, "peak": None},
    "places": {"active": 2, "warm": 3, "cold": 40},
    "damaged_blocks": 0,
    "leaks": [],
}


def test_a_worker_says_what_it_keeps_of_kv():
    """Allocated, reserved and peak of each tier, and where the conversations are; an absent tier has no line."""
    found = {finding.topic: finding for finding in judge("chat", REPORT)}
    device = found["KV of chat, device"]
    assert device.finding == "allocated 96.0 MiB, reserved 128 MiB, peak 120 MiB, active 2"
    assert device.meaning == "conversations: 2 active, 3 warm, 40 cold"
    assert found["KV of chat, disk"].finding == "allocated 2.0 GiB, reserved 10.0 GiB"
    assert "KV of chat, host" not in found
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"leaks": ["block 7 of full: 1 holders, 0 known"]}, "suspected leaks: 1, block 7"),
        ({"damaged_blocks": 3}, "3 damaged blocks"),
        ({"fragmentation": 0.8}, "fragmentation 80%"),
        ({"allocator": {"allocated": MIB, "reserved": 2 * MIB, "fragmentation": 0.5}}, "fragmentation 50%"),
    ],
)
def test_what_is_wrong_with_kv_warns(changes, words):
    """Leaks, damage and scattered blocks are each a line of their own."""
    (warned,) = [one for one in judge("chat", {**REPORT, **changes}) if one.verdict is Verdict.WARN]
    assert words in warned.finding


def test_what_the_allocator_has_is_told_beside_kv():
    """torch's own figures of a device: allocated, reserved, peak, active."""
    sizes = {"allocated": 5 * MIB, "reserved": 8 * MIB, "peak": 7 * MIB, "active": 4 * MIB}
    words = [one.finding for one in judge("chat", {**REPORT, "allocator": sizes})]
    assert "allocated 5.0 MiB, reserved 8.0 MiB, peak 7.0 MiB, active 4.0 MiB" in words


def test_what_a_worker_does_not_say_is_left_out():
    """Another version's report is no fault of the machine."""
    assert list(judge("chat", {})) == []
    assert list(judge("chat", {"leaks": None, "fragmentation": "much", "device": [], "places": 3})) == []


def test_no_daemon_is_no_finding(pagein, memory, monkeypatch, nowhere):
    """doctor works without one."""
    installed(monkeypatch, onnx="onnxruntime 1.2", command="command")
    result = pagein("doctor")
    assert result.exit_code == 0
    assert "KV of" not in result.stdout


def test_a_disk_is_measured_only_when_it_is_named(pagein, memory, monkeypatch, nowhere, tmp_path):
    """256 MiB are not written without being asked for, and nothing stays."""
    installed(monkeypatch, onnx="onnxruntime 1.2", command="command")
    measured = []

    def measure(folder):
        measured.append(folder)
        return DiskTest(0.5e9, 2e9, "ext4", "direct reads")

    monkeypatch.setattr("pagein.cli.doctor_kv.measure_disk", measure)
    pagein("doctor")
    assert measured == []
    found = line(pagein("doctor", "--disk", "."), "disk .")
    assert "writes 0.50 GB/s, reads 2.00 GB/s, ext4" in found


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (DiskTest(1e9, 5e9, "tmpfs", ""), "memory, not a disk"),
        (DiskTest(1e8, 1e8, "nfs4", ""), "slow"),
    ],
)
def test_a_folder_that_is_no_good_for_kv(monkeypatch, tmp_path, test, words):
    """Memory counts twice, and a slow disk may lose against computing anew."""
    monkeypatch.setattr("pagein.cli.doctor_kv.measure_disk", lambda folder: test)
    finding = disk_finding(tmp_path)
    assert finding.verdict is Verdict.WARN
    assert words in finding.meaning


def test_a_disk_is_really_written_and_read(monkeypatch, tmp_path):
    """The whole way, on a smaller file; it is gone afterwards."""
    monkeypatch.setattr("pagein.cli.disk_trial.SIZE", 16 * 1024**2)
    found = disk_trial.measure_disk(tmp_path)
    assert found.write > 0
    assert found.read > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_filled(monkeypatch, tmp_path):
    """Room for the file and a GiB more, or an error with both numbers."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk_trial.shutil, "disk_usage", lambda path: usage(0, 0, 700 * 1024**2))
    with pytest.raises(DiskFull, match="700 MiB"):
        disk_trial.measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
