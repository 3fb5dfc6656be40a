"""The few things that a model whose weights come and go must answer otherwise than an ordinary one."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch

from pagein.errors import ModelUnsuited

_BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "cache_position")
"""Inputs that transformers cuts into the pieces of a prompt; with others (embeddings, pictures) it goes in whole."""


def give_face(model: Any, device: torch.device) -> None:
    """Make a model say where it computes (its own weights may all be away), and refuse what needs all of them at once.

    The class is a subclass of its own with the same name, so that ``isinstance`` and what transformers reads from the
    name hold.
    """
    ordinary = type(model)
    own = {"generate": _generate(ordinary)} if hasattr(ordinary, "generate") else {}
    model.__class__ = type(
        ordinary.__name__,
        (ordinary,),
        {
            "__module__": ordinary.__module__,
            "__doc__": ordinary.__doc__,
            "__call__": _call(ordinary),
            "ordinary_class": ordinary,
            "device": property(lambda self: device),
            "to": _to,
            "_apply": _refused("changing the tensors of all its modules (half, cuda, …)"),
            "save_pretrained": _refused("save_pretrained"),
            "train": _train,
            **own,
        },
    )


def _call(ordinary: type) -> Any:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        with self.pagein.computing():
            text = self.pagein.speculator.running(named)
            compute = partial(ordinary.__call__, self)
            return compute(*args, **named) if text is None else text.step(named, compute)

    return call


def _generate(ordinary: type) -> Any:
    def generate(self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **named: Any) -> Any:
        settings = generation_config or self.generation_config
        cached = named.get("use_cache", settings.use_cache) is not False
        others = [name for name, one in named.items() if isinstance(one, torch.Tensor) and name not in _BY_TOKEN]
        if not cached or others:
            named.setdefault("prefill_chunk_size", None)
        return ordinary.generate(self, inputs, generation_config, *args, **named)  # type: ignore[attr-defined]

    return wraps(ordinary.generate)(generate)  # type: ignore[attr-defined]


def _to(self: Any, *args: Any, **settings: Any) -> Any:
    wanted = [settings.get("device"), settings.get("dtype"), *args]
    for one in wanted:
        if isinstance(one, str):
            one = torch.device(one)
        if isinstance(one, torch.device) and one.type != self.device.type:
            raise ModelUnsuited(
                f"{type(self).__name__} is streamed to {self.device} and cannot be moved to {one}",
                hint="name the device when it is loaded: AutoModel.from_pretrained(..., device=...)",
            )
        if isinstance(one, torch.dtype) and one != self.dtype:
            raise ModelUnsuited(
                f"{type(self).__name__} is streamed in {self.dtype} and cannot be cast to {one}",
                hint="name the dtype when it is loaded: AutoModel.from_pretrained(..., dtype=...)",
            )
    return self


def _train(self: Any, mode: bool = True) -> Any:
    if mode:
        raise ModelUnsuited(f"{type(self).__name__} is streamed, which is for inference only: its weights come and go")
    return torch.nn.Module.train(self, False)


def _refused(what: str) -> Any:
    def refuse(self: Any, *args: Any, **settings: Any) -> Any:
        raise ModelUnsuited(
            f"{type(self).__name__} is streamed, so that {what} would find only a part of its weights",
            hint="the folder that it was loaded from holds all of them",
        )

    return refuse
