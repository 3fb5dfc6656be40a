"""What makes two workers the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pagein.protocol import WorkerSpec
from pagein.supervisor import digest as module
from pagein.supervisor.digest import worker_digest

SPEC = WorkerSpec(name="m", engine="command", token="t", socket_dir="/run")
OF_ONE_START = {
    "token": "u",
    "socket_dir": "/other",
    "allowance": {"ram": 1},
    "ready_timeout": 1.0,
    "environ": {"A": "1"},
    "adopt_wait": 1.0,
    "kv_disk": 1,
}
DECIDING = {
    "name": "n",
    "engine": "onnx",
    "path": "/m.gguf",
    "command": ["server"],
    "recipe": "clip",
    "context": 1,
    "parallel": 2,
    "threads": 1,
    "cpus": [0],
    "device": "cuda:0",
    "options": {"a": 1},
    "kv_dir": "/kv",
}


@pytest.mark.parametrize("name", DECIDING)
def test_each_setting_counts(name):
    """A worker with any other setting is not taken over."""
    assert worker_digest(replace(SPEC, **{name: DECIDING[name]}), {}) != worker_digest(SPEC, {})


@pytest.mark.parametrize("name", OF_ONE_START)
def test_what_belongs_to_one_start_does_not_count(name):
    """Token, folder and allowance are another matter with each start."""
    assert worker_digest(replace(SPEC, **{name: OF_ONE_START[name]}), {}) == worker_digest(SPEC, {})


def test_no_field_of_the_spec_is_forgotten():
    """Whoever adds one decides here whether it counts; without a decision it does."""
    known = {*DECIDING, *OF_ONE_START}
    undecided = {field.name for field in fields(WorkerSpec)} - known
    assert not undecided & set(module._OF_ONE_START)


def test_weights_and_environment_count_and_the_session_does_not():
    """Other weights under the same path, or another variable, make another worker; a new shell does not."""
    one = worker_digest(SPEC, {"A": "1", "INVOCATION_ID": "x", "SHLVL": "1"}, "weights")
    assert one == worker_digest(SPEC, {"SHLVL": "2", "A": "1"}, "weights")
    assert one != worker_digest(SPEC, {"A": "1"}, "others")
    assert one != worker_digest(SPEC, {"A": "2"}, "weights")
    assert one != worker_digest(SPEC, {}, "weights")
    assert one == worker_digest(replace(SPEC, options={}), {"A": "1"}, "weights")


def test_another_version_of_pagein_is_another_worker(monkeypatch):
    """What the two say to each other may have changed."""
    before = worker_digest(SPEC, {})
    monkeypatch.setattr(module, "__version__", "0.0.0-other")
    assert worker_digest(SPEC, {}) != before


def test_values_stay_secret():
    """Only the digest is kept, also of names that are no text."""
    assert "hush" not in worker_digest(SPEC, {"MY_VALUE": "hush", "BYTES": "\udcff"})
