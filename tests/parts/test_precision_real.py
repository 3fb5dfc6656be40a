"""A real language model in 8 and 4 bits: how far it is from itself, and that adapters' rules hold on real sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.parts.splitting.analyse import analyse
from pagein.parts.splitting.apply import apply
from pagein.parts.splitting.comparing import compare
from tests.examples.running import model_folder
from tests.parts.models import mapping, quiet

pytestmark = pytest.mark.engines


def test_smollm2_in_fewer_bits(tmp_path, load):
    """Logits of SmolLM2-135M: 8 bits choose nearly every word as bf16 does, 4 bits most; each in its file's bytes."""
    folder = model_folder("smollm2-135m-hf")
    quiet()
    tasks = mapping(write={"kind": "generate", "max_new_tokens": 8, "samples": ["Gravity is the force that"]})
    plan = apply(analyse(folder, tasks), tmp_path, ["int8", "int4"]).plan
    sizes = {form: file.nbytes for form, file in plan.parts["backbone"].files.items()}
    assert sizes["int8"] < 0.61 * sizes["stored"]
    assert sizes["int4"] < 0.44 * sizes["stored"]
    found = []
    compare(tmp_path, tasks, ["int8", "int4"], found.append)
    eight, four = found
    assert (eight.nbytes, four.nbytes, eight.stored_bytes) == (sizes["int8"], sizes["int4"], sizes["stored"])
    assert 0 < eight.mean < 0.06 * eight.scale
    assert eight.mean < four.mean < 0.35 * four.scale
    assert eight.agree is not None
    assert four.agree is not None
    assert eight.agree >= four.agree > 0.5
    model = load(tmp_path, precision="int4")
    assert model.pagein.report().owned == sizes["int4"]
