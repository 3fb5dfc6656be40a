"""The transformers engine on a GPU, over HTTP, with the stand-in for torch.cuda: whose bytes its allowance counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.engines import torch_device
from pagein.engines.transformers import usable
from pagein.errors import DoesNotFit
from pagein.protocol import ALLOWANCE_PATH, SLEEP_PATH, WAKE_PATH
from pagein.weights import auto
from pagein.weights.planning.device_memory import DeviceMemory
from pagein.weights.streaming.on_cuda import SCRATCH, OnCuda
from pagein.weights.streaming.stage import OnCpu, Stage
from tests.engines.local.conftest import Reply, request
from tests.weights.fake_cuda import Cuda, NoNvml, device

from .conftest import ROOMY, Running
from .test_transformers import COMPLETIONS, complete

pytestmark = pytest.mark.torch
GRANTED = {"ram": 1 << 30, "cuda:1": ROOMY}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A torch that sees a GPU; what is copied there stays in the host's memory."""
    made = Cuda()
    seen = SimpleNamespace(cuda=made, device=torch.device, __version__=torch.__version__)
    monkeypatch.setattr(torch_device, "torch", seen)
    monkeypatch.setattr(auto, "stage_for", lambda name: _stage(name, made))
    return made


def _stage(name: str, cuda: Cuda) -> Stage:
    if name == "cpu":
        return OnCpu()
    assert name == "cuda:0", "a worker sees its own device only"
    return OnCuda(device(), cuda, DeviceMemory(device(), cuda, NoNvml()))


def granted(cuda: Cuda) -> int:
    """What torch's allocator may have now."""
    return [event[2] for event in cuda.log if event[:2] == ("allocator", "may have")][-1]


async def allow(running: Running, count: int, **more: Any) -> Reply:
    """Change its allowance."""
    return await request(running.endpoint, "POST", ALLOWANCE_PATH, json={"bytes": count, **more})


async def test_the_plan_has_the_devices_bytes_and_says_the_same_text(run, cuda):
    """What it was granted of RAM is the host's share and no part of it; streamed and whole, the text is a CPU's."""
    wanted = await complete(run(), "abc", 20)
    running = run(device="cuda:1", allowance=GRANTED)
    plan = running.plan
    assert plan.memory == usable(ROOMY)
    assert plan.runtime == cuda.taken + SCRATCH
    assert granted(cuda) == ROOMY - cuda.taken
    assert await complete(running, "abc", 20) == wanted
    assert (await allow(running, running.streaming)).status == 200
    assert 0 < len(running.plan.resident) < 6
    assert await complete(running, "abc", 20) == wanted


async def test_its_allowance_is_that_of_its_device(run, cuda):
    """It may be named, and another pool is refused by name; the answer says what the host has beside."""
    running = run(device="cuda:1", allowance=GRANTED)
    less = running.streaming
    reply = await allow(running, less, pool="cuda:1")
    assert (reply.status, reply.body["pool"], reply.body["bytes"]) == (200, "cuda:1", less)
    assert any("of the host" in line for line in reply.body["plan"])
    assert granted(cuda) == less - cuda.taken
    for pool in ("ram", "cuda:0"):
        refused = await allow(running, less, pool=pool)
        assert (refused.status, "cuda:1" in refused.error["message"]) == (400, True)


async def test_a_refusal_leaves_plan_and_bound(run, cuda):
    """Both numbers are of the whole allowance."""
    running = run(device="cuda:1", allowance=GRANTED)
    before, bound = running.plan, granted(cuda)
    refused = await allow(running, 1000)
    assert (refused.status, refused.error["memory_bytes"]) == (507, 1000)
    assert refused.error["need_bytes"] > cuda.taken
    assert (running.plan, granted(cuda)) == (before, bound)


async def test_what_the_host_lacks_is_told_in_its_own_numbers(run, cuda, monkeypatch):
    """The spare part of an allowance of the device is no part of the host's buffers."""
    running = run(device="cuda:1", allowance=GRANTED)
    less = running.streaming
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    refused = await allow(running, less)
    assert (refused.status, refused.error["memory_bytes"]) == (507, 1000)
    assert "spare" not in refused.error["parts"]


async def test_it_sleeps_and_wakes_on_its_device(run, cuda):
    """Asleep torch has given back what it held of the device; awake it writes the same."""
    running = run(device="cuda:1", allowance=GRANTED)
    assert (await allow(running, running.streaming)).status == 200
    wanted = await complete(running, "abc")
    assert cuda.registered
    cuda.log.clear()
    assert (await request(running.endpoint, "POST", SLEEP_PATH)).status == 200
    assert ("device", "empties") in cuda.log
    assert not cuda.registered
    assert (await request(running.endpoint, "POST", COMPLETIONS, json={"prompt": "abc"})).status == 503
    assert (await request(running.endpoint, "POST", WAKE_PATH)).status == 200
    assert await complete(running, "abc") == wanted


def test_a_device_that_others_filled_is_refused_with_both_numbers(run, cuda):
    """Free is what the device has free, however much was granted."""
    cuda.total = cuda.taken + (1 << 20)
    with pytest.raises(DoesNotFit) as refused:
        run(device="cuda:1", allowance=GRANTED)
    assert refused.value.details["memory_bytes"] == cuda.total


async def test_a_device_that_fills_up_meanwhile_costs_the_change_and_not_the_model(run, cuda, monkeypatch):
    """The former plan is taken again, and the refusal says what the driver said."""
    running = run(device="cuda:1", allowance=GRANTED)
    assert (await allow(running, running.streaming)).status == 200
    wanted, held = await complete(running, "abc"), running.plan.memory
    keep, calls = OnCuda.keep, []

    def full(self: OnCuda, buffer: Any, bound: Any) -> Any:
        calls.append(bound)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return keep(self, buffer, bound)

    monkeypatch.setattr(OnCuda, "keep", full)
    refused = await allow(running, ROOMY)
    assert (refused.status, "out of memory" in refused.error["message"]) == (503, True)
    assert running.plan.memory == held
    assert await complete(running, "abc") == wanted


async def test_a_device_that_cannot_even_hold_the_former_plan_ends_the_worker(run, cuda, monkeypatch):
    """The daemon then loads the model anew, instead of a worker that answers nothing."""
    running = run(device="cuda:1", allowance=GRANTED)
    assert (await allow(running, running.streaming)).status == 200

    def full(self: OnCuda, buffer: Any, bound: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OnCuda, "keep", full)
    monkeypatch.setattr(OnCuda, "open", lambda self, slots: full(self, None, None))
    reply = await allow(running, ROOMY)
    assert reply.status == 500
    assert "cannot have" in running.engine.wait()
