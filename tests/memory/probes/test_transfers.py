"""What the doctor says of links, locked and shared memory, from captured machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagein.memory.probes import confines, nvidia, pcie
from pagein.memory.probes.advice import Verdict
from pagein.memory.probes.confines import Confines, SharedMemory
from pagein.memory.probes.pcie import Link
from pagein.memory.probes.transfers import Transfers, advise_transfers, read_transfers

GIB, MIB = 1024**3, 1024**2
LINK = Link("cuda:0", 1, 16, 4, 16)


def found(facts: Transfers, topic: str):
    """The one finding on a topic."""
    (finding,) = [finding for finding in advise_transfers(facts) if finding.topic == topic]
    return finding


@pytest.fixture
def machine(tmp_path):
    """Write files of a captured machine below a root; returns it."""

    def write(**files: str):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


class Nvml:
    """NVML of one card; a call that the card does not know is missing, as in an older binding."""

    def __init__(self, **answers: int) -> None:
        self._answers = answers

    def __getattr__(self, name: str):
        if name == "nvmlDeviceGetPciInfo":
            return lambda handle: SimpleNamespace(busId=b"00000000:3B:00.0")
        if name not in self._answers:
            raise AttributeError(name)
        return lambda handle: self._answers[name]


CARD = nvidia.GpuDevice(0, "NVIDIA L4", 24 * GIB, 20 * GIB)
CALLS = {
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
}


def test_nvml_tells_the_link_now_and_at_its_best(tmp_path):
    """A card at rest trains down, so both are read."""
    assert pcie.read_links(Nvml(**CALLS), [CARD], tmp_path) == [Link("cuda:0", 1, 8, 4, 16)]


def test_sysfs_tells_what_nvml_does_not(machine):
    """By the card's bus address, of which sysfs writes four digits of the domain, in small letters."""
    folder = "sys__bus__pci__devices__0000:3b:00.0__"
    root = machine(
        **{
            f"{folder}current_link_speed": "2.5 GT/s PCIe\n",
            f"{folder}max_link_speed": "16.0 GT/s PCIe\n",
            f"{folder}current_link_width": "16\n",
            f"{folder}max_link_width": "16\n",
        }
    )
    assert pcie.read_links(Nvml(), [CARD], root) == [Link("cuda:0", 1, 16, 4, 16)]


@pytest.mark.parametrize("text", ["Unknown\n", "", "12.0 GT/s PCIe\n"])
def test_a_link_that_nobody_knows_is_unknown(machine, text):
    """A virtual machine has no link; no number is made up."""
    root = machine(**{"sys__bus__pci__devices__0000:3b:00.0__current_link_speed": text})
    (link,) = pcie.read_links(Nvml(), [CARD], root)
    assert (link.generation, link.lanes, link.bytes_per_second) == (None, None, None)
    assert "unknown" in found(Transfers((link,)), "PCIe cuda:0").finding


def test_a_gpu_without_memory_of_its_own_has_no_link(tmp_path):
    """Its memory is the machine's."""
    unified = nvidia.GpuDevice(0, "NVIDIA GB10", None, None, unified=True)
    assert pcie.read_links(Nvml(**CALLS), [unified], tmp_path) == []


def test_the_speed_is_that_of_the_best_generation_and_the_lanes_in_use():
    """Generation 4 has 1.969 GB/s a lane; lanes that are not connected move nothing."""
    assert LINK.bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    narrow = Link("cuda:0", 4, 4, 4, 16)
    assert narrow.bytes_per_second == pytest.approx(7.876e9, rel=1e-3)
    finding = found(Transfers((narrow,)), "PCIe cuda:0")
    assert finding.verdict is Verdict.WARN
    assert "4 of 16 lanes" in finding.meaning
    assert found(Transfers((LINK,)), "PCIe cuda:0").verdict is Verdict.OK


def test_the_limit_of_locked_memory(machine):
    """Bytes, no limit, or unknown: three different things."""
    line = "Max locked memory         {}              {}              bytes     \n"
    root = machine(proc__self__limits=line.format("8388608", "8388608"))
    assert confines.read_confines(root).locked == 8 * MIB
    root = machine(proc__self__limits=line.format("unlimited", "unlimited"))
    assert confines.read_confines(root).locked_unlimited
    root = machine(proc__self__limits="Max cpu time unlimited\n")
    unknown = confines.read_confines(root)
    assert (unknown.locked, unknown.locked_unlimited) == (None, False)


def test_a_small_lock_limit_matters_beside_a_gpu_only():
    """Without one nothing is pinned, so there is nothing to warn of."""
    small = Confines(locked=8 * MIB)
    assert found(Transfers(confines=small), "locked memory").verdict is Verdict.OK
    assert found(Transfers((LINK,), confines=small), "locked memory").verdict is Verdict.WARN
    assert found(Transfers((LINK,), confines=Confines(locked_unlimited=True)), "locked memory").verdict is Verdict.OK


def test_mount_options_are_those_of_the_last_mount():
    """A mount hides the one below it, and both halves of the line count."""
    text = (
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24683652k\n"
        "30 25 0:27 / /dev/shm ro,noexec shared:4 - tmpfs tmpfs rw,size=65536k\n"
        "31 25 0:28 / /dev/shmother rw - tmpfs tmpfs rw\n"
    )
    assert confines.mount_options(text, "/dev/shm") == ("ro", "noexec", "rw", "size=65536k")
    assert confines.mount_options(text, "/dev/mqueue") is None


def test_shared_memory_is_looked_at_where_it_is(machine):
    """Size, free bytes and permissions come from the folder itself; no folder is no finding."""
    root = machine(proc__self__mountinfo="")
    assert confines.read_confines(root).shm is None
    (root / "dev/shm").mkdir(parents=True)
    (root / "dev/shm").chmod(0o1777)
    shm = confines.read_confines(root).shm
    assert shm is not None
    assert (shm.mode, shm.writable) == (0o1777, True)
    assert shm.size is not None
    assert shm.size > 0


@pytest.mark.parametrize(
    ("shm", "verdict", "words"),
    [
        (SharedMemory(16 * GIB, 16 * GIB, 0o1777, writable=True), Verdict.OK, "enough"),
        (SharedMemory(64 * MIB, 64 * MIB, 0o1777, writable=True), Verdict.WARN, "--shm-size"),
        (SharedMemory(16 * GIB, 16 * GIB, 0o755, writable=False), Verdict.WARN, "1777"),
        (SharedMemory(16 * GIB, 16 * GIB, 0o777, writable=True), Verdict.WARN, "sticky"),
    ],
)
def test_shared_memory_that_others_stumble_over(shm, verdict, words):
    """Too small, not writable, and without the sticky bit are three things to say."""
    finding = found(Transfers(confines=Confines(shm=shm)), "/dev/shm")
    assert finding.verdict is verdict
    assert words in finding.meaning


@pytest.mark.parametrize(("text", "mode"), [("1", "enforcing"), ("0\n", "permissive")])
def test_selinux(machine, text, mode):
    """What the kernel says; without its file system it is off."""
    assert confines.read_confines(machine(sys__fs__selinux__enforce=text)).selinux == mode


def test_apparmor_names_the_profile(machine):
    """The profile of this process, from its own folder where several modules are stacked."""
    root = machine(sys__module__apparmor__parameters__enabled="Y\n", proc__self__attr__current="other\n")
    assert confines.read_confines(root).apparmor == "other"
    root = machine(proc__self__attr__apparmor__current="docker-default (enforce)\n")
    facts = confines.read_confines(root)
    assert facts.apparmor == "docker-default (enforce)"
    assert "must allow" in found(Transfers(confines=facts), "AppArmor").meaning
    assert confines.read_confines(machine(sys__module__apparmor__parameters__enabled="N\n")).apparmor is None


def test_a_machine_without_either_says_so(machine):
    """Nothing is on: one line, not two."""
    topics = [finding.topic for finding in advise_transfers(read_transfers(machine(proc__self__limits="")))]
    assert topics == ["access control"]
