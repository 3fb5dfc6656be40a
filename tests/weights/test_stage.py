"""What computes from a buffer's bytes, and which device that is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import ModelUnsuited
from pagein.memory.buffers import Buffer
from pagein.weights.streaming.binding import Bound
from pagein.weights.streaming.ring import Slot
from pagein.weights.streaming.stage import SCRATCH, OnCpu, resident_now, stage_for

pytestmark = pytest.mark.torch


def test_a_cpu_computes_from_the_buffer_itself() -> None:
    """Nothing is copied: neither what stays nor what passes through a slot."""
    stage, buffer, slot = OnCpu(), Buffer(4096), Slot(0, Buffer(4096))
    kept, still = stage.keep(buffer, Bound("none", []))
    assert still is buffer
    buffer.view[7] = 3
    assert kept[7] == 3
    stage.open([slot])
    landed = stage.land(slot, Bound("none", []))
    slot.buffer.view[9] = 5
    assert landed[9] == 5


def test_views_made_in_inference_mode_can_be_written_to_outside_of_it() -> None:
    """A first pass in inference mode does not forbid the next one to put tensors together outside of it."""
    stage, slot = OnCpu(), Slot(0, Buffer(4096))
    with torch.inference_mode():
        stage.open([slot])
        kept, _ = stage.keep(Buffer(4096), Bound("none", []))
    stage.land(slot, Bound("none", []))[:4].copy_(torch.ones(4, dtype=torch.uint8))
    kept[:4].copy_(torch.ones(4, dtype=torch.uint8))


def test_the_memory_of_a_cpu_is_the_process_s() -> None:
    """The runtime of a plan is what the process has, and torch's scratch; it could have what is free beside."""
    stage = OnCpu()
    assert stage.runtime() == pytest.approx(resident_now() + SCRATCH, rel=0.05)
    assert stage.free() > resident_now()


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    """cuda without a card, and devices that nothing streams to, are errors at the start."""
    if not torch.cuda.is_available():
        with pytest.raises(ModelUnsuited, match="cuda"):
            stage_for("cuda")
        assert stage_for("auto").device.type == "cpu"
    with pytest.raises(ModelUnsuited, match="'meta'"):
        stage_for("meta")


def test_products_are_measured_once_for_each_dtype() -> None:
    """What a token is multiplied with in a second is a measured speed, taken once in a process."""
    stage = OnCpu()
    first = stage.products(torch.float32)
    assert first is not None
    assert first > 0
    assert stage.products(torch.float32) == first
