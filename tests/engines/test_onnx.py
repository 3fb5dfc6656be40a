"""The onnx engine: how sessions are set up, and what it says when a model cannot be served."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from pagein.engines.contract import find_engine
from pagein.engines.local.threads import compute_threads
from pagein.engines.onnx import Onnx, ReopenedSession
from pagein.errors import ConfigError, EngineMissing, LoadFailed
from pagein.protocol import Capability, WorkerSpec
from tests.engines.local.conftest import request


def saliency_model(folder: Path, channel: int = 0) -> Path:
    """A network that returns one channel of an 8 × 8 image."""
    nodes = [helper.make_node("Gather", ["image", "channel"], ["map"], axis=1)]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 8, 8])
    out = helper.make_tensor_value_info("map", TensorProto.FLOAT, [1, 1, 8, 8])
    number = helper.make_tensor("channel", TensorProto.INT64, [1], [channel])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [image], [out], [number]), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


TINY = {"size": 8, "grid": 2, "mean": 0.0, "deviation": 255.0}


async def test_a_model_is_served_until_stopped(tmp_path: Path, spec_for):
    """start answers with the recipe's capability, the endpoint infers, stop ends it."""
    spec = spec_for(saliency_model(tmp_path), recipe="saliency", options=TINY)
    engine = Onnx(spec)
    started = engine.start()
    assert started.capabilities == [Capability.SALIENCY]
    picture = b"BM" + bytes.fromhex("3a0000000000000036000000280000000100000001000000010018000000000004") + bytes(19)
    picture += b"\x00\x00\xff\x00"
    headers = {"Content-Type": "image/bmp"}
    reply = await request(started.endpoint, "POST", "/v1/images/saliency", data=picture, headers=headers)
    assert reply.status == 200, reply.body
    assert reply.body["map"]["values"] == [1.0] * 4
    engine.stop()
    assert engine.wait() == "it was stopped"


async def test_a_model_sleeps_and_computes_the_same_afterwards(tmp_path: Path, spec_for):
    """Asleep its file is not held, which shows when it is exchanged: awake it is the new file that computes."""
    path = saliency_model(tmp_path)
    engine = Onnx(spec_for(path, recipe="saliency", options=TINY))
    started = engine.start()
    assert started.sleeps
    picture = b"BM" + bytes.fromhex("3a0000000000000036000000280000000100000001000000010018000000000004") + bytes(19)
    upload = {"data": picture + b"\x00\x00\xff\x00", "headers": {"Content-Type": "image/bmp"}}

    async def peak() -> tuple[int, object]:
        reply = await request(started.endpoint, "POST", "/v1/images/saliency", **upload)
        return reply.status, reply.body["map"]["values"] if reply.status == 200 else None

    assert await peak() == (200, [1.0] * 4)
    assert (await request(started.endpoint, "POST", "/sleep")).status == 200
    assert await peak() == (503, None)
    path.unlink()
    failed = await request(started.endpoint, "POST", "/wake_up")
    assert (failed.status, failed.error["code"]) == (503, "load_failed")
    assert await peak() == (503, None)
    saliency_model(tmp_path, channel=1)
    assert (await request(started.endpoint, "POST", "/wake_up")).status == 200
    assert await peak() == (200, [0.0] * 4)
    engine.stop()


def test_a_closed_session_lets_go_and_opens_once():
    """Closing drops the only reference; opening an open one loads nothing again."""

    class Loaded:
        def run(self, names, feed):
            return [names, feed]

        def get_inputs(self):
            return ["in"]

        def get_outputs(self):
            return ["out"]

    made: list[weakref.ref[Loaded]] = []

    def open_again() -> Loaded:
        session = Loaded()
        made.append(weakref.ref(session))
        return session

    place = ReopenedSession(open_again)
    assert (place.run(None, {}), place.get_inputs(), place.get_outputs()) == ([None, {}], ["in"], ["out"])
    place.open()
    assert len(made) == 1
    place.close()
    assert made[0]() is None
    place.open()
    assert (len(made), place.get_inputs()) == (2, ["in"])


def test_the_engine_is_found_by_its_name():
    """The entry point `onnx` leads here, and the version names the library."""
    assert find_engine("onnx") is Onnx
    assert Onnx.version().startswith("onnxruntime 1.")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"recipe": None}, ConfigError, "needs a recipe"),
        ({"options": {"prepack": "yes"}}, ConfigError, "true or false"),
        ({"options": {**TINY, "optimisation": "most"}}, ConfigError, "all, extended, basic, none"),
        ({"options": {**TINY, "gird": 2}}, ConfigError, "did you mean 'grid'?"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(tmp_path: Path, spec_for, change, error, words):
    """Recipe and options are checked when the engine is made."""
    spec = spec_for(tmp_path / "absent.onnx", **{"recipe": "saliency", "options": TINY, **change})
    with pytest.raises(error) as caught:
        Onnx(spec)
    assert words in caught.value.message


def test_a_broken_file_is_load_failed_with_its_name(tmp_path: Path, spec_for):
    """onnxruntime's own errors become LoadFailed with the file."""
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(LoadFailed, match=r"cannot load .*model\.onnx"):
        Onnx(spec_for(broken, recipe="saliency", options=TINY)).start()


def test_a_missing_cuda_provider_is_told_before_loading(tmp_path: Path, spec_for):
    """A model on cuda:N with the CPU build of onnxruntime is EngineMissing with what to install."""
    spec = spec_for(saliency_model(tmp_path), recipe="saliency", options=TINY, device="cuda:0")
    with pytest.raises(EngineMissing, match="no CUDA provider"):
        Onnx(spec).start()


@pytest.mark.parametrize("options", [{}, {"prepack": False}, {"optimisation": "none"}])
def test_engine_options_do_not_change_results(tmp_path: Path, spec_for, options):
    """Prepacking and graph optimisation change memory and speed only."""
    session = Onnx(spec_for(tmp_path, recipe="saliency", options={**TINY, **options})).open_session(
        saliency_model(tmp_path)
    )
    image = np.random.default_rng(3).random((1, 3, 8, 8), np.float32)
    assert np.array_equal(session.run(None, {"image": image})[0], image[:, :1])


def test_threads_follow_the_setting_or_the_allowed_cores(monkeypatch):
    """Configured threads win; otherwise one per core that this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert compute_threads(WorkerSpec("m", "onnx", "t", "/", threads=7)) == 7
    assert compute_threads(WorkerSpec("m", "onnx", "t", "/")) == 3
