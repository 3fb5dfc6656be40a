"""Saving and restoring conversations in llama.cpp: where it does so, and what a saved one depends on.

llama-server saves a request slot's KV cache to a file and reads it back (``--slot-save-path``, ``POST
/slots/N?action=save``). It checks little of what it reads: a truncated file ends the process, flipped bytes and the
cache of other weights of the same shape are taken for good (build 11549; #27068). So the daemon verifies, and needs to
know everything that two servers must have in common.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pagein.engines.listening import socket_endpoint
from pagein.protocol import StateFacts, WorkerSpec

if TYPE_CHECKING:
    from pagein.engines.llama_settings import LlamaSettings

WAY = "llama-slots"
_FOLDER = "slots"
_OTHER_STATE = ("--lora", "--control-vector", "--mmproj", "--model-draft", "-md", "--hf-repo-draft", "-hfd", "--spec-")
"""Arguments whose effect on the cache the weights' digest does not tell, or that keep state beside the cache."""
_SECRET = ("--api-key", "--slot-save-path", "--no-slots")
"""Arguments that shut the daemon out."""
_SETTINGS = ("LLAMA_", "GGML_")


def folder_for(spec: WorkerSpec, *, vectors: bool, args: Sequence[str]) -> str | None:
    """Where this worker saves conversations, or None where it has none, or where they cannot be kept truthfully.

    Never where the server listens on a port, which every user of the machine can reach.
    """
    if vectors or socket_endpoint(spec.socket_dir) is None:
        return None
    if any(arg.startswith((*_OTHER_STATE, *_SECRET)) for arg in args):
        return None
    if spec.slots_dir is None:
        return os.path.join(spec.socket_dir, _FOLDER)
    return os.path.join(spec.slots_dir, os.path.basename(spec.socket_dir))  # the name of one start, as long as it lives


def with_folder(settings: LlamaSettings) -> LlamaSettings:
    """Make the folder, for the owner only, since llama.cpp's files are readable by all; without it nothing is saved."""
    if settings.slots_folder is None:
        return settings
    try:
        os.makedirs(settings.slots_folder, mode=0o700, exist_ok=True)
        os.chmod(settings.slots_folder, 0o700)
    except OSError as error:
        print(f"pagein: no folder for saved conversations: {error}", file=sys.stderr, flush=True)
        return replace(settings, slots_folder=None)
    return settings


def facts(settings: LlamaSettings, build: str, context: int | None, program: str | None) -> StateFacts | None:
    """What the daemon needs to know, once the server answers."""
    if settings.slots_folder is None:
        return None
    options = settings.options
    return StateFacts(
        way=WAY,
        folder=settings.slots_folder,
        slots=settings.parallel,
        build=build if program is None else f"{build}, {_stamp(program)}",
        context=context,
        kv_type_k=options.cache_type_k,
        kv_type_v=options.cache_type_v,
        layout={
            "streams": str(settings.parallel),  # a file of one stream is refused by a cache of two (build 11549)
            "flash_attention": {"auto": "auto", True: "on", False: "off"}[options.flash_attention],
            "window": "full" if options.swa_full else "cut",
            "checkpoints": str(options.checkpoints),
            "gpu_layers": str(settings.gpu_layers),
            "arguments": _digest(options.args) if program is not None else "",
            "environment": _digest(_changed_settings()),
        },
    )


def _stamp(program: str) -> str:
    """What tells a program from the one that was there before: many builds call themselves ``b0-unknown``."""
    seen = os.stat(program)
    return f"{seen.st_size} bytes of {seen.st_mtime_ns}"


def _changed_settings() -> list[str]:
    """Variables of the environment that set what no option sets, RoPE scaling for one."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS))


def _digest(settings: Sequence[str]) -> str:
    """A short stand-in; the settings themselves may be long, and may be secret."""
    return hashlib.sha256(json.dumps(list(settings)).encode()).hexdigest()[:16] if settings else ""
