"""What `pagein tune kv` prints is what the engine reads."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import yaml

from pagein.cli.tune_kv import yaml_lines
from pagein.engines.writing.kv_options import read_kv
from pagein.kv.trial.tuning import Measured, tune

pytestmark = pytest.mark.torch
GIB = 1024**3


@pytest.mark.parametrize("host", [None, 40 * GIB])
def test_the_engine_takes_every_line_that_was_found(host):
    """Names and values, with a GPU and without."""
    measured = Measured(131_072, 0, 8192, [(64, 0.1), (1024, 1.5)], {"disk": 2e9}, 8 * GIB, host, host and 2 * host)
    tuned = tune(measured, 2048)
    options = read_kv(yaml.safe_load("\n".join(yaml_lines(tuned, measured)))["kv"], 4, "chat")
    assert options.memory == 8 * GIB
    assert (options.settings.active, options.settings.warm) == (tuned.active, tuned.warm)
    assert options.settings.max_tokens == tuned.max_tokens
    assert options.settings.host_share == tuned.host_share
    assert options.host == (None if host is None else int(2 * host * tuned.pinned_share))
