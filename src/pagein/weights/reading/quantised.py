"""Checkpoints that come quantised already: told by their configuration, and refused by name before anything is read."""

from __future__ import annotations

from collections.abc import Mapping

from pagein.errors import ModelUnsuited

_WORDS = {
    "fp8": "fp8 with block scales",
    "mxfp4": "MXFP4 blocks",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "quanto": "quanto",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM fp8",
    "higgs": "HIGGS",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "bitnet": "BitNet",
}
"""What the methods of config.json are called by people."""


def quantisation_of(config: Mapping[str, object]) -> str | None:
    """Return the method that a configuration or its text part names; None for weights as they were trained."""
    text = config.get("text_config")
    for body in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            found = body.get(key)
            if isinstance(found, dict) and found:
                method = found.get("quant_method") or found.get("quant_algo") or found.get("format")
                if not method and (found.get("load_in_4bit") or found.get("load_in_8bit")):
                    method = "bitsandbytes"
                return str(method or "an unnamed method")
    return None


def refuse_quantised(config: Mapping[str, object], name: str) -> None:
    """Raise ModelUnsuited, by name, for a checkpoint that is quantised already: its codes would be read as numbers."""
    method = quantisation_of(config)
    if method is None:
        return
    words = _WORDS.get(method.lower(), method)
    raise ModelUnsuited(
        f"{name}: its weights are quantised already ({words}), which cannot be streamed or packed",
        hint="use the model's original bf16 or fp16 weights; `pagein quantize` makes 4 or 8 bits of them",
        method=method,
    )
