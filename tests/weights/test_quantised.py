"""Checkpoints that are quantised already are refused by name, before a byte of weights is read."""

from __future__ import annotations

import pytest

from pagein.errors import ModelUnsuited
from pagein.weights.reading.quantised import quantisation_of, refuse_quantised


@pytest.mark.parametrize(
    ("config", "method", "word"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8", "block scales"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4", "MXFP4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq", "GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq", "AWQ"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes", "bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors", "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8", "fp8"),
        ({"quantization_config": {"quant_method": "newest"}}, "newest", "newest"),
        ({"quantization_config": {"bits": 3}}, "an unnamed method", "unnamed"),
    ],
)
def test_each_method_is_refused_by_its_name(config, method, word):
    """A known method is called as people call it, an unknown one as the file does; also in the text part."""
    assert quantisation_of(config) == method
    with pytest.raises(ModelUnsuited, match=word):
        refuse_quantised(config, "model")


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"text_config": {"hidden_size": 4}}])
def test_plain_weights_pass(config):
    """A configuration without a word of quantisation is taken."""
    assert quantisation_of(config) is None
    refuse_quantised(config, "model")
