"""What the doctor says of a machine's memory."""

from dataclasses import replace

import pytest

from pagein.errors import PageinError
from pagein.memory.probes import advice, linux, nvidia
from pagein.memory.probes.advice import Facts, Finding, Verdict
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure

GIB, MIB = 1024**3, 1024**2
RAM = PoolReading("ram", 16 * GIB, 9 * GIB, "physical memory")
PLAIN = Facts(
    snapshot=MachineSnapshot({"ram": RAM}, swap_total=0, swap_used=0, pressure=Pressure(0.0, 0.0)),
    physical=16 * GIB,
    linux=True,
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
    assert (facts.defrag, facts.proactive, facts.zram, facts.zswap) == ("always", 0, 0, True)
    assert facts.blocks.large == 8 * MIB


def test_that_machine_is_warned_of_what_it_is(fixtures):
    """A driver without NVML, swappiness, strict overcommit, huge pages that stall, few descriptors."""
    facts = advice.read_facts(fixtures / "cgroup/v2_unlimited")
    assert "pagein[nvidia]" in found(facts, "GPU").meaning
    assert found(facts, "swap").verdict is Verdict.WARN
    assert found(facts, "swap").finding == "0 B of 2.0 GiB used, swappiness 60, zswap before it"
    assert found(facts, "huge pages").verdict is Verdict.WARN
    assert "8.0 MiB of 999 MiB free memory could be huge pages" in found(facts, "fragmentation").finding
    assert "compaction_proactiveness=0" in found(facts, "fragmentation").finding
    assert found(facts, "overcommit").finding.startswith("strict (vm.overcommit_memory=2), 1.3 GiB of 10.0 GiB left")
    assert found(facts, "open files").verdict is Verdict.WARN


def test_what_is_missing_is_not_made_up(fixtures):
    """An old machine without settings has no lines on them, and a warning where the unknown matters."""
    facts = advice.read_facts(fixtures / "proc/old_kernel")
    assert (facts.swappiness, facts.overcommit, facts.huge_pages, facts.files) == (None, None, None, None)
    assert found(facts, "memory").verdict is Verdict.WARN
    topics = {finding.topic for finding in advice.advise(facts)}
    assert topics.isdisjoint({"overcommit", "huge pages", "fragmentation", "open files"})


def swapping(**more: object) -> Facts:
    """A machine with 8 GiB of swap."""
    return replace(PLAIN, snapshot=replace(PLAIN.snapshot, swap_total=8 * GIB, swap_used=GIB), **more)


@pytest.mark.parametrize(
    ("facts", "verdict", "finding", "meaning"),
    [
        (PLAIN, Verdict.OK, "none", "OOM kill at once"),
        (swapping(), Verdict.OK, "1.0 GiB of 8.0 GiB used", "the system decides"),
        (swapping(swappiness=60), Verdict.WARN, "1.0 GiB of 8.0 GiB used, swappiness 60", "vm.swappiness=10"),
        (swapping(swappiness=10), Verdict.OK, "1.0 GiB of 8.0 GiB used, swappiness 10", "file cache goes first"),
        (swapping(swappiness=180, zram=8 * GIB), Verdict.OK, "swappiness 180, all of it zram", "is RAM itself"),
        (swapping(swappiness=60, zram=GIB, zswap=True), Verdict.WARN, "60, 1.0 GiB of it zram", "swapped out"),
        (swapping(swappiness=60, zram=0, zswap=True), Verdict.WARN, "60, zswap before it", "swapped out"),
    ],
    ids=["none", "unknown", "eager", "reluctant", "zram", "partly zram", "zswap"],
)
def test_each_kind_of_swap_means_something_else(facts, verdict, finding, meaning):
    """Disk that is used early is a warning; compressed RAM is meant to be used early, and frees little of weights."""
    swap = found(facts, "swap")
    assert swap.verdict is verdict
    assert swap.finding.endswith(finding)
    assert meaning in swap.meaning


@pytest.mark.parametrize(
    ("enabled", "defrag", "verdict"),
    [
        ("always", "always", Verdict.WARN),
        ("always", "madvise", Verdict.OK),
        ("always", None, Verdict.OK),
        ("madvise", "always", Verdict.OK),
        ("never", "always", Verdict.OK),
    ],
)
def test_huge_pages_are_warned_of_only_where_every_allocation_may_stall(enabled, defrag, verdict):
    """Both settings `always` make engines wait for compaction; each alone does not."""
    assert found(replace(PLAIN, huge_pages=enabled, defrag=defrag), "huge pages").verdict is verdict


SCATTERED = linux.FreeBlocks(free=GIB, large=GIB // 20)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (replace(PLAIN, blocks=SCATTERED), Verdict.OK),
        (replace(PLAIN, blocks=SCATTERED, proactive=0), Verdict.WARN),
        (replace(PLAIN, blocks=SCATTERED, huge_pages="always", defrag="always"), Verdict.WARN),
        (replace(PLAIN, blocks=SCATTERED, huge_pages="never"), None),
        (replace(PLAIN, blocks=linux.FreeBlocks(GIB, GIB // 8)), None),
        (PLAIN, None),
    ],
    ids=["rare", "and stays so", "and stalls", "not wanted", "enough", "unknown"],
)
def test_fragmentation_is_told_where_it_matters(facts, verdict):
    """Nine tenths of free memory in small blocks, on a machine that uses huge pages: told; else not a line."""
    lines = [finding.verdict for finding in advice.advise(facts) if finding.topic == "fragmentation"]
    assert lines == ([] if verdict is None else [verdict])


def test_a_captured_machine_with_room_is_not_called_fragmented(fixtures):
    """The hybrid machine has most of its free memory in large blocks, and its swap is off."""
    facts = advice.read_facts(fixtures / "cgroup/hybrid")
    assert (facts.huge_pages, facts.defrag, facts.proactive, facts.zram) == ("madvise", "madvise", 20, 0)
    assert "fragmentation" not in {finding.topic for finding in advice.advise(facts)}


def test_stalls_at_a_v1_limit_are_those_of_the_machine(fixtures):
    """Whose stalls are shown is said where the cgroup that binds has none of its own."""
    v1 = found(advice.read_facts(fixtures / "cgroup/v1_nested"), "pressure")
    assert "of the whole machine: cgroup v1" in v1.finding
    assert "v1" not in found(advice.read_facts(fixtures / "cgroup/v2_nested"), "pressure").finding


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
    topics = {finding.topic for finding in advice.advise(replace(PLAIN, linux=False))}
    assert topics.isdisjoint({"cgroups", "GPU"})


def test_this_machine_can_be_diagnosed():
    """The doctor always has something to say of memory, and every line is whole."""
    findings = advice.diagnose()
    assert findings[0].topic == "memory"
    assert all(finding.topic and finding.finding and finding.meaning for finding in findings)


def test_nothing_readable_is_one_clear_error(tmp_path):
    """Without even the total there is no report."""
    with pytest.raises(PageinError, match="MemTotal"):
        advice.read_facts(tmp_path)
