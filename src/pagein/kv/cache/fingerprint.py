"""What computed a KV cache, as the fields of its root key: a change of any is a miss, and is told by its name."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pagein.kv.cache.geometry import Geometry
from pagein.kv.snapshots.weights import WeightDigests
from pagein.kv.tiers.settings import KvSettings

_PROCESS = f"of this process {secrets.token_hex(16)}"
"""Stands for the weights of an adapter of which nobody gave the digest: another one may have its name tomorrow."""


def fingerprint_of(model: Any, geometry: Geometry, settings: KvSettings, weights: str) -> dict[str, str]:
    """Return all fields but the tenant's, which comes from the server with each conversation.

    ``weights`` is a digest of every byte of them (`weights_digest`), or a text of this process alone where nothing
    outlives it.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    dtypes = sorted({str(group.shape.dtype) for group in geometry.groups})
    return {
        "weights": weights,
        "model": type(model).__name__,
        "dtype": ",".join(dtypes),
        "geometry": geometry.text,
        "rope": _rope(text),
        "attention": attention_of(model),
        "adapter": "",
        "tenant": "",
        "media": "",
        "kept": settings.compression or "exact",
        "layout": f"transformers {_build(geometry)}",
    }


def _build(geometry: Geometry) -> str:
    """State of side layers is what their objects have as attributes: any release may change those."""
    build = version("transformers")
    return build if geometry.side_layers else build.split(".")[0]


def attention_of(model: Any) -> str:
    """Return which kernel computes a model's attention: others round otherwise."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return str(getattr(text, "_attn_implementation", None))


def active_adapters(model: Any, digests: Mapping[str, str]) -> str:
    """Return which adapters a model computes with now, by name and, where the caller gave it, digest."""
    names: list[str] = []
    if getattr(model, "_hf_peft_config_loaded", False):
        try:
            names = list(model.active_adapters())
        except ValueError:  # loaded and switched off
            names = []
    elif getattr(model, "active_adapter", None) is not None:
        active = model.active_adapter
        names = [active] if isinstance(active, str) else list(active)
    named = [f"{len(name)}:{name}={digests.get(name, _PROCESS)}" for name in names]
    return ";".join([*named, *(f"merged:{len(one)}:{one}={digest}" for one, digest in sorted(digests.items()))])


def weights_digest(model: Any, memory: Path | None = None) -> str:
    """Return a digest of every byte of a model's weights, as they are now.

    Of a model that streams its files, their digest (remembered in ``memory`` while they stand untouched); of any other
    one its parameters' and buffers' in memory. Reads them once, about 1 GB/s a core.
    """
    streamed = getattr(model, "pagein", None)
    if streamed is not None:
        return WeightDigests(memory).digest(streamed.checkpoint.files)
    digest = hashlib.sha256(b"pagein tensors 1\n")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(memoryview(_bytes_of(tensor)))
    return digest.hexdigest()


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the fields that differ, in words."""
    names = sorted(one.keys() | other.keys())
    return [
        f"{name} (was {_short(one.get(name))}, is {_short(other.get(name))})"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _rope(text: Any) -> str:
    """Everything of the configuration that turns positions into angles."""
    named = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
    return ";".join(f"{name}={_stable(getattr(text, name, None))}" for name in named)


def _stable(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_stable(value[key])}" for key in sorted(value, key=str)) + "}"
    return repr(value)


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


def _short(value: str | None) -> str:
    return "nothing" if not value else value if len(value) <= 40 else f"{value[:12]}…"
