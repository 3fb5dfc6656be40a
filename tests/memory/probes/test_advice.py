"""What the doctor says of a machine's memory."""

from dataclasses import replace

import pytest

from pagein.errors import PageinError
from pagein.memory.probes import advice, nvidia
from pagein.memory.probes.advice import Facts, Finding, Verdict
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure

GIB = 1024**3
RAM = PoolReading("ram", 16 * GIB, 9 * GIB, "physical memory")
PLAIN = Facts(
    snapshot=MachineSnapshot({"ram": RAM}, swap_total=0, swap_used=0, pressure=Pressure(0.0, 0.0)),
    physical=16 * GIB,
    linux=True,
    can_limit=True,
    overcommit=0,
    huge_pages="madvise",
    files=20000,
)


def found(facts: Facts, topic: str) -> Finding:
    """The one finding on a topic."""
    (finding,) = [finding for finding in advice.advise(facts) if finding.topic == topic]
    return finding


def test_a_plain_machine_is_fine():
    """Nothing to warn of where nothing is wrong."""
    findings = advice.advise(PLAIN)
    assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert findings[0].topic == "memory"
    assert findings[0].finding == "16.0 GiB, 9.0 GiB available; set by physical memory"


def test_every_limit_of_every_ancestor_has_its_line(fixtures):
    """What binds is told with numbers, and what the machine has besides."""
    findings = advice.advise(advice.read_facts(fixtures / "cgroup/v2_nested"))
    limits = [(finding.topic, finding.finding.split(",")[0]) for finding in findings if "cgroup v2" in finding.topic]
    assert limits == [
        ("cgroup v2 /ai.slice/ai-models.slice", "memory.max 12.0 GiB"),
        ("cgroup v2 /ai.slice/ai-models.slice", "memory.high 8.0 GiB"),
        ("cgroup v2 /ai.slice", "memory.max 16.0 GiB"),
    ]
    assert "(the machine has 32.0 GiB)" in findings[0].finding


def test_facts_of_a_captured_machine(fixtures):
    """Settings are read from where the kernel keeps them."""
    facts = advice.read_facts(fixtures / "cgroup/v2_unlimited")
    assert (facts.swappiness, facts.overcommit, facts.huge_pages, facts.files) == (60, 2, "always", 256)
    assert (facts.driver, facts.nvml, facts.physical) == ("580.126.09", False, 16 * GIB)
    assert facts.commit_limit == 10 * GIB


def test_that_machine_is_warned_of_what_it_is(fixtures):
    """A driver without NVML, swappiness, strict overcommit, few descriptors."""
    facts = advice.read_facts(fixtures / "cgroup/v2_unlimited")
    assert "pagein[nvidia]" in found(facts, "GPU").meaning
    assert found(facts, "swap").verdict is Verdict.WARN
    assert found(facts, "overcommit").finding.startswith("strict (vm.overcommit_memory=2), 1.3 GiB of 10.0 GiB left")
    assert found(facts, "open files").verdict is Verdict.WARN


def test_what_is_missing_is_not_made_up(fixtures):
    """An old machine without settings has no lines on them, and a warning where the unknown matters."""
    facts = advice.read_facts(fixtures / "proc/old_kernel")
    assert (facts.swappiness, facts.overcommit, facts.huge_pages, facts.files) == (None, None, None, None)
    assert found(facts, "memory").verdict is Verdict.WARN
    assert found(facts, "worker limits").finding == "no memory controller"
    topics = {finding.topic for finding in advice.advise(facts)}
    assert topics.isdisjoint({"overcommit", "huge pages", "open files"})


def test_a_kernel_without_psi_is_told():
    """No stall figures: pressure is seen late."""
    facts = replace(PLAIN, snapshot=replace(PLAIN.snapshot, pressure=Pressure()))
    pressure = [finding for finding in advice.advise(facts) if finding.topic == "pressure"]
    assert [finding.verdict for finding in pressure] == [Verdict.WARN, Verdict.OK]


@pytest.mark.parametrize(("available", "verdict"), [(GIB, Verdict.WARN), (0, Verdict.BAD)])
def test_pressure_now_is_told_with_its_signs(available, verdict):
    """Tight is a warning, critical is bad."""
    snapshot = replace(PLAIN.snapshot, pools={"ram": replace(RAM, available=available)})
    finding = found(replace(PLAIN, snapshot=snapshot), "pressure")
    assert finding.verdict is verdict
    assert "available, below" in finding.meaning


def test_a_read_only_cgroup_means_the_watchdog():
    """Whether workers can be limited depends on the innermost group."""
    assert advice._can_limit(()) is None
    finding = found(replace(PLAIN, can_limit=False), "worker limits")
    assert finding.verdict is Verdict.WARN
    assert "Delegate=yes" in finding.meaning


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("rtx4090", Verdict.OK, "24.0 GiB, 19.0 GiB free"),
        ("gb10", Verdict.OK, "integrated"),
        ("lost", Verdict.WARN, "GPU is lost"),
    ],
)
def test_each_gpu_has_its_line(replay, name, verdict, words):
    """A card is a pool, an integrated GPU shares, a broken one is told with the driver's words."""
    devices = tuple(nvidia.read_devices(replay(name)))
    finding = found(replace(PLAIN, devices=devices), "GPU cuda:0")
    assert finding.verdict is verdict
    assert words in finding.finding


def test_wsl_and_unified_machines_are_named(fixtures):
    """Two kinds of machine whose memory is not what it seems."""
    wsl = advice.advise(advice.read_facts(fixtures / "proc/wsl2"))
    assert any(finding.finding == "WSL2" for finding in wsl)
    unified = replace(PLAIN, snapshot=replace(PLAIN.snapshot, unified=True))
    assert any(finding.finding == "shared by CPU and GPU" for finding in advice.advise(unified))


def test_a_mac_is_not_measured_by_linux():
    """No cgroups, no PSI, no NVIDIA lines there."""
    topics = {finding.topic for finding in advice.advise(replace(PLAIN, linux=False, can_limit=None))}
    assert topics.isdisjoint({"cgroups", "worker limits", "GPU"})


def test_this_machine_can_be_diagnosed():
    """The doctor always has something to say of memory, and every line is whole."""
    findings = advice.diagnose()
    assert findings[0].topic == "memory"
    assert all(finding.topic and finding.finding and finding.meaning for finding in findings)


def test_nothing_readable_is_one_clear_error(tmp_path):
    """Without even the total there is no report."""
    with pytest.raises(PageinError, match="MemTotal"):
        advice.read_facts(tmp_path)
