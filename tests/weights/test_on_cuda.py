"""Weights on an accelerator: the order of copies and kernels, and whole models, on a stand-in for torch.cuda."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from pagein.errors import DoesNotFit
from pagein.memory.buffers import Buffer
from pagein.weights import auto
from pagein.weights.planning.device_memory import DeviceMemory
from pagein.weights.reading.layout import Move
from pagein.weights.streaming.binding import Bound
from pagein.weights.streaming.on_cuda import SCRATCH, OnCuda
from pagein.weights.streaming.ring import Slot

from .fake_cuda import Cuda, NoNvml, device
from .test_exact import compare

pytestmark = pytest.mark.torch

KINDS = ["llama", "llama-tied", "gemma3", "mixtral", "qwen3-moe", "gpt2", "t5"]
UNIT = Bound("unit", [], 512)
UNIT.moves = [Move(8, 3, 0)]


@pytest.fixture
def slot() -> Slot:
    made = Slot(0, Buffer(4096))
    made.buffer.view[8:11] = b"abc"
    return made


def on(cuda: Cuda) -> OnCuda:
    """Return a stage on the stand-in."""
    return OnCuda(device(), cuda, DeviceMemory(device(), cuda, NoNvml()))


def staged(cuda: Cuda, slot: Slot) -> OnCuda:
    """Return a stage with a slot; the log begins after it."""
    stage = on(cuda)
    stage.open([slot])
    return stage


def test_kernels_wait_for_the_copy_and_the_next_copy_for_the_kernels(slot: Slot) -> None:
    """A copy begins after the kernels that used its slot, kernels begin after it, the host waits for the copy only."""
    cuda = Cuda()
    stage = staged(cuda, slot)
    cuda.log.clear()
    assert bytes(stage.land(slot, UNIT)[:3].tolist()) == b"abc"
    stage.leave(slot)
    assert cuda.log == [
        ("copies", "waits", "event2"),
        ("copies", "records", "event1"),
        ("compute", "waits", "event1"),
        ("compute", "records", "event2"),
        ("host", "waits", "event1"),
    ]


def test_the_first_copy_waits_for_what_used_the_memory_before(slot: Slot) -> None:
    """Memory on the device may come from a tensor whose kernels are still queued: the slot begins with their end."""
    cuda = Cuda()
    staged(cuda, slot)
    assert cuda.log[-1] == ("compute", "records", "event2")


def test_a_slot_has_one_place_on_the_device(slot: Slot) -> None:
    """What lands again lands where it did before, also outside of inference mode: nothing is allocated in between."""
    with torch.inference_mode():
        stage = staged(Cuda(), slot)
        first = stage.land(slot, UNIT)
        stage.leave(slot)
    slot.buffer.view[8:11] = b"xyz"
    again = stage.land(slot, UNIT)
    assert again.data_ptr() == first.data_ptr()
    assert bytes(again[:3].tolist()) == b"xyz"


@pytest.mark.parametrize("code", [0, 2])
def test_page_locked_buffers_are_released_and_refusal_is_survived(slot: Slot, code: int) -> None:
    """A registered buffer is unregistered at the end; where locking is refused, copies still work."""
    cuda = Cuda(register=code)
    stage = staged(cuda, slot)
    stage.land(slot, UNIT)
    stage.leave(slot)
    assert len(cuda.registered) == (1 if code == 0 else 0)
    stage.close()
    assert cuda.registered == []


def test_a_resident_part_gives_its_host_memory_back() -> None:
    """On a device what stays is a copy, each tensor where the device wants it."""
    buffer = Buffer(4096)
    buffer.view[8:11] = b"abc"
    kept, gone = on(Cuda()).keep(buffer, UNIT)
    assert gone is None
    assert bytes(kept[:3].tolist()) == b"abc"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(auto, "stage_for", lambda name: on(made))
    return made


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_a_device_says_what_a_full_load_says(
    make_model: Any, load: Any, cuda: Cuda, kind: str, share: float
) -> None:
    """Through copies, shifted places and a cache of experts on the device every bit stays the same."""
    folder = make_model(kind)
    model = load(folder, share)
    assert model.pagein.plan.fits_whole == (share == 1.0)
    compare(folder, model)
    assert bool(cuda.registered) == (share < 1.0)
    model.pagein.close()
    assert cuda.registered == []


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_every_tensor_begins_as_aligned_as_torchs_own(make_model: Any, load: Any, cuda: Cuda, share: float) -> None:
    """A safetensors file aligns to 8 bytes; kernels choose by alignment, so results would depend on the header."""
    model = load(make_model("llama"), share)
    seen: set[int] = set()

    def note(module: Any, inputs: Any) -> None:
        there = [one for one in module.parameters() if not one.is_meta]
        seen.update((one.data_ptr() - one.untyped_storage().data_ptr()) % OnCuda.alignment for one in there)

    for layer in model.model.layers:
        for linear in layer.modules():
            linear.register_forward_pre_hook(note)
    with torch.inference_mode():
        model(torch.arange(2, 12)[None])
    assert seen == {0}


def test_the_budget_is_the_devices_and_the_host_is_said_beside(make_model: Any, load: Any, cuda: Cuda) -> None:
    """The plan counts what the process has on the device; buffers of the host stand in a line of their own."""
    model = load(make_model("qwen3-moe"), 0.5)
    plan = model.pagein.plan
    assert plan.runtime == cuda.taken + SCRATCH
    assert all(unit.slot_bytes % OnCuda.grain == 0 for unit in plan.needs.units)
    (line,) = [note for note in model.pagein.notes if "of the host" in note]
    assert f"{plan.slots} page-locked buffers" in line
    assert "experts on their way" in line


def test_a_host_without_room_for_the_buffers_is_refused(
    make_model: Any, load: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory cannot be taken back by the system: what is not there is refused with both numbers."""
    model = load(make_model("llama"), 1.0)
    needs = model.pagein.plan.needs
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(DoesNotFit, match="page-locked"):
        model.pagein.set_memory(needs.fixed + (needs.whole - needs.fixed) // 2)


def test_what_leaves_the_device_is_given_back_to_it(make_model: Any, load: Any, cuda: Cuda) -> None:
    """torch keeps freed memory for itself: at rest, and before less is loaded again, it is told to let go."""
    model = load(make_model("llama"), 1.0)
    for act in (lambda: model.pagein.set_memory(1 << 39), model.pagein.rest):
        cuda.log.clear()
        act()
        assert ("device", "empties") in cuda.log


def test_a_file_whose_data_begin_at_an_odd_place_is_copied_in_one_go(make_model: Any, load: Any, cuda: Cuda) -> None:
    """Neighbours that stay aligned together are one copy, so that a block takes a few and not one a tensor."""
    folder: Path = make_model("llama", "float32", "1GB")
    model = load(folder, 1.0)
    blocks = model.pagein._placement.blocks
    assert all(len(block.moves) < len(block.bindings) for block in blocks)
    assert all(move.into % OnCuda.alignment == 0 for block in blocks for move in block.moves)


def test_no_plan_takes_more_than_the_device_has_free(make_model: Any, load: Any, cuda: Cuda) -> None:
    """A device cannot swap: what others have of it is no part of the budget, whatever was asked for."""
    streamed = load(make_model("llama"), 1.0).pagein
    cuda.total = streamed.plan.needs.fixed + streamed.plan.needs.whole // 2
    assert streamed.set_memory(1 << 40).memory == cuda.total
