"""What a worker inherits."""

from __future__ import annotations

import pytest

from pagein.protocol import WorkerSpec
from pagein.supervisor.environment import worker_environment


def make(own=None, inherited=None, **fields):
    spec = WorkerSpec(**({"name": "m", "engine": "onnx", "token": "t", "socket_dir": "/run"} | fields))
    return worker_environment(spec, own or {}, inherited or {})


@pytest.mark.parametrize(
    "name",
    ["PAGEIN_SERVER__API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_TOKEN",
     "LLAMA_ARG_CTX_SIZE", "NOTIFY_SOCKET", "LISTEN_FDS"],
)  # fmt: skip
def test_secrets_and_foreign_settings_are_not_inherited(name):
    """A worker gets neither the daemon's secrets nor settings that would change its memory unseen."""
    assert name not in make(inherited={name: "value"})
    assert make(own={name: "value"}, inherited={name: "other"})[name] == "value"


@pytest.mark.parametrize("name", ["PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV", "KEYBOARD"])
def test_the_rest_is_inherited(name):
    """Programs find what they need."""
    assert make(inherited={name: "value"})[name] == "value"


def test_threads_are_counted_once_and_never_spin():
    """Every library's pool has the configured size and sleeps when idle."""
    environment = make(threads=3, cpus=[0, 1])
    assert {environment[f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "OPENBLAS", "RAYON")} == {"3"}
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["GOMP_SPINCOUNT"] == environment["KMP_BLOCKTIME"] == "0"


def test_without_a_number_there_is_one_thread_per_allowed_core():
    """Affinity counts, not the machine."""
    assert make(cpus=[4, 5, 6, 6])["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda:0", "0"), ("cuda:3", "3")])
def test_a_worker_sees_its_own_device_only(device, visible):
    """Row G10; no context is made on a card that the model does not use."""
    environment = make(device=device, inherited={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert environment["CUDA_VISIBLE_DEVICES"] == visible
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_network_is_off_for_engines_and_open_for_commands():
    """A command may be meant to fetch its own model."""
    assert make()["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in make(engine="command", command=["serve"])


def test_the_model_s_own_variables_have_the_last_word():
    """`env` of the configuration overrides everything."""
    assert make(own={"OMP_NUM_THREADS": "7"}, threads=2)["OMP_NUM_THREADS"] == "7"
