"""A PEFT folder (``adapter_config.json``, ``adapter_model.safetensors``) as a part; needs neither PEFT nor torch."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from pathlib import Path

from pagein.catalog.bounded import bad, read_json
from pagein.catalog.folder import inside
from pagein.catalog.hf_config import CONFIG_LIMIT
from pagein.catalog.safetensors import read_safetensors
from pagein.errors import ModelUnsuited
from pagein.parts.splitting.making import SourceTensor, source_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNKNOWN = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "megatron_config",
)
"""Settings under which a LoRA computes something else."""


def read_adapter(folder: Path, part: str, prefix: str = "") -> dict[str, SourceTensor]:
    """Return an adapter's tensors by the names that a part has for them; raises BadModelFile, ModelUnsuited.

    ``PART/MODULE.lora_A.weight``, ``lora_B.weight``, ``scaling`` (F64), and ``PART/MODULE.LEAF`` for layers that were
    trained whole; ``prefix`` is where the adapted model lies in a larger one. Scaling is alpha / rank, with rsLoRA
    alpha / √rank (arXiv 2312.03732).
    """
    config = read_json(inside(folder, CONFIG), CONFIG_LIMIT)
    _check(folder, config)
    path = inside(folder, WEIGHTS)
    tensors: dict[str, SourceTensor] = {}
    for stored in read_safetensors(path, places=True).tensors or ():
        name = stored.name.removeprefix(_PREFIX)
        if not stored.name.startswith(_PREFIX) or "lora_embedding" in name or "lora_magnitude" in name:
            raise ModelUnsuited(f"{path}: the tensor {stored.name!r} is none of a LoRA for linear layers")
        tensors[f"{part}/{prefix}{name}"] = source_of(stored)
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            tensors[f"{part}/{prefix}{module}.scaling"] = _number_tensor(_scaling(config, module, stored.shape[0]))
    if not tensors:
        raise bad(path, "has no tensor")
    return tensors


def adapter_digest(folder: Path) -> dict[str, str]:
    """Return the sha256 of an adapter's files, by name."""
    found: dict[str, str] = {}
    for name in (CONFIG, WEIGHTS):
        with inside(folder, name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _check(folder: Path, config: dict[str, object]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelUnsuited(f"{folder}: the adapter is of kind {str(kind)[:40]!r}; LoRA adapters become parts")
    for name in _UNKNOWN:
        if config.get(name):
            raise ModelUnsuited(f"{folder}: the adapter was made with {name}, which computes more than a LoRA does")
    if config.get("bias", "none") != "none":
        raise ModelUnsuited(f"{folder}: the adapter trains biases (bias: {str(config['bias'])[:20]})")


def _scaling(config: dict[str, object], module: str, rank: int) -> float:
    alpha = _number(config.get("lora_alpha", 8))
    patterns = config.get("alpha_pattern")
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        # As PEFT matches: a pattern stands for the end of a module's name, from a dot on.
        try:
            matched = re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
        except re.error as error:
            raise ModelUnsuited(f"{CONFIG}: alpha_pattern has {str(pattern)[:80]!r}: {error}") from None
        if matched:
            alpha = _number(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _number_tensor(number: float) -> SourceTensor:
    return SourceTensor("F64", (1,), lambda: [struct.pack("<d", number)])


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelUnsuited(f"{CONFIG}: lora_alpha is {str(value)[:40]!r}, which is no number")
    return float(value)
