"""GPUs as NVML tells of them; no fault of a driver is ever an exception or a number."""

import sys

import pytest

from pagein.memory.probes import nvidia


def test_a_discrete_card_has_a_pool(replay):
    """Total and free in bytes, as the driver gives them."""
    (device,) = nvidia.read_devices(replay("rtx4090"))
    assert (device.pool, device.name) == ("cuda:0", "NVIDIA GeForce RTX 4090")
    assert (device.total, device.free, device.unified, device.problem) == (25757220864, 20401094656, False, None)


@pytest.mark.parametrize("name", ["gb10", "jetson_orin"])
def test_an_integrated_gpu_shares_memory(replay, name):
    """DGX Spark and Jetson answer Not Supported: no size of their own, and no problem either."""
    (device,) = nvidia.read_devices(replay(name))
    assert (device.unified, device.total, device.free, device.problem) == (True, None, None, None)


def test_an_integrated_gpu_that_gives_the_systems_memory_still_shares_it(replay):
    """A size on such a product is the system's, which must not count twice."""
    nvml = replay("gb10")
    nvml.devices[0]["memory"] = {"total": 130_000_000_000, "free": 1, "used": 1}
    (device,) = nvidia.read_devices(nvml)
    assert (device.unified, device.total) == (True, None)


def test_not_supported_on_an_unknown_product_is_unknown(replay):
    """It may be a slice or a virtual GPU: neither unified nor a size, but a reason."""
    (device,) = nvidia.read_devices(replay("unknown_integrated"))
    assert (device.unified, device.total) == (False, None)
    assert device.problem.startswith("Not Supported (")


def test_a_lost_card_does_not_hide_the_others(replay):
    """A card whose every call fails keeps its number, with the driver's words."""
    lost, other = nvidia.read_devices(replay("lost"))
    assert (lost.pool, lost.name, lost.total, lost.problem) == ("cuda:0", None, None, "GPU is lost")
    assert (other.pool, other.total) == ("cuda:1", 24152899584)


def test_with_mig_the_first_slice_is_the_limit(replay):
    """A program sees one slice of the card, not the card."""
    (device,) = nvidia.read_devices(replay("h100_mig"))
    assert device.total == 10468982784
    assert nvidia.process_bytes(replay("h100_mig"), [device]) == {"cuda:0": {100: 60000000}}


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        (None, {"cuda:0": 85000000000, "cuda:1": 1000000000}),
        ("1,0", {"cuda:0": 1000000000, "cuda:1": 85000000000}),
        ("1", {"cuda:0": 1000000000}),
        ("GPU-bbbb", {"cuda:0": 1000000000}),
        ("0,7,1", {"cuda:0": 85000000000}),
        ("GPU-", {}),  # two begin so
        ("", {}),
        ("-1", {}),
        ("nonsense", {}),
    ],
)
def test_visible_devices_number_as_cuda_does(replay, visible, totals):
    """CUDA_VISIBLE_DEVICES orders, hides, takes beginnings of identifiers, and ends at the first unknown entry."""
    devices = nvidia.read_devices(replay("two_cards"), visible)
    assert {device.pool: device.free for device in devices} == totals


def test_a_slice_can_be_named(replay):
    """A MIG identifier selects that slice."""
    (device,) = nvidia.read_devices(replay("h100_mig"), "MIG-41b3359c-e721-56e5-8009-12e5797ed514")
    assert device.total == 10468982784


def test_a_process_in_both_lists_counts_once(replay):
    """Compute and graphics lists give the same figure for the same process."""
    nvml = replay("rtx4090")
    used = nvidia.process_bytes(nvml, nvidia.read_devices(nvml))
    assert used == {"cuda:0": {100: 4563402752, 300: 209715200, 900: 131072000}}


def test_sizes_and_lists_that_are_missing_stay_unknown(replay):
    """No size is None (WDDM, WSL2); no list is no pool; an empty list is known to be empty."""
    nvml = replay("two_cards")
    assert nvidia.process_bytes(nvml, nvidia.read_devices(nvml))["cuda:1"] == {100: None, 101: 700000000}
    nvml = replay("jetson_orin")
    assert nvidia.process_bytes(nvml, nvidia.read_devices(nvml)) == {}
    nvml = replay("lost")
    assert nvidia.process_bytes(nvml, nvidia.read_devices(nvml)) == {"cuda:1": {}}


def test_without_the_binding_there_are_no_gpus(monkeypatch):
    """The package is optional."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia.open_nvml.__wrapped__() is None
    assert nvidia.read_devices(None) == []
    assert nvidia.process_bytes(None, []) == {}


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    """The binding without its library is the same as no binding."""

    class NoDriver:
        @staticmethod
        def nvmlInit():
            raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", NoDriver)
    assert nvidia.open_nvml.__wrapped__() is None
