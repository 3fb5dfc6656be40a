"""The model as transformers builds it, without a byte of weights, and what its parts are for.

No list of architectures: the repeated blocks are the module lists of like children that hold most of the weights; the
embedding and the head are what the model itself names as such.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from pagein.errors import ModelUnsuited
from pagein.weights.packed.packed_linear import PackedLinear
from pagein.weights.reading.checkpoint import Checkpoint
from pagein.weights.reading.sources import DTYPES

CPU = torch.device("cpu")
SMALLEST_SHARE = 0.02
"""A module list with less of the model's weights is no stack worth streaming: it stays resident."""


@dataclass(frozen=True, slots=True)
class Block:
    """One repeated block."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Structure:
    """A model on ``meta`` and its parts by role."""

    model: Any
    stacks: tuple[tuple[Block, ...], ...]
    """Each list of repeated blocks, in the order of the module tree; an encoder-decoder has two."""
    embeddings: tuple[tuple[str, nn.Embedding], ...]
    """Every lookup table of the vocabulary's size."""
    head: tuple[str, nn.Linear | PackedLinear] | None
    tied: bool
    """Head and embedding are one tensor."""

    @property
    def blocks(self) -> list[Block]:
        """All blocks, stack after stack."""
        return [block for stack in self.stacks for block in stack]


def build(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: torch.device = CPU,
    change: Callable[[nn.Module], object] | None = None,
) -> Structure:
    """Build the model on ``meta``, its computed buffers on the device, and find its parts.

    ``change`` may replace modules before the parts are told (packed layers). Raises ModelUnsuited with the class's
    name.
    """
    model_class, config = _class_of(checkpoint)
    chosen = stored_dtype(checkpoint) if dtype == "auto" else as_dtype(dtype)
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=chosen)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ModelUnsuited(f"{model_class.__name__} cannot be built without its weights: {error}") from error
    model.eval()
    if change is not None:
        change(model)
    _empty(model, model._get_dtype_plan(chosen))
    make_buffers(model, device)
    stacks = find_stacks(model)
    if not stacks:
        raise ModelUnsuited(f"{model_class.__name__} has no repeated blocks, so that nothing of it can be streamed")
    tables, head = _embeddings(model), _head(model)
    return with_ties(Structure(model, stacks, tables, head, tied=False))


def with_ties(structure: Structure) -> Structure:
    """Return the structure with `Structure.tied` told anew: head and embedding may have been parted."""
    weight = None if structure.head is None else structure.head[1]._parameters.get("weight")
    tied = weight is not None and any(weight is table.weight for _, table in structure.embeddings)
    return replace(structure, tied=tied)


def _class_of(checkpoint: Checkpoint) -> tuple[Any, Any]:
    if "auto_map" in checkpoint.config:
        raise ModelUnsuited(
            f"{checkpoint.folder}: the model brings code of its own (auto_map in config.json), which is never run",
            hint="use a model whose architecture transformers has",
        )
    config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    if names:
        found = getattr(transformers, names[0])
        if hasattr(found, "_from_config"):
            return found, config
    for mapping in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if type(config) in mapping._model_mapping:
            return mapping._model_mapping[type(config)], config
    named = ", ".join(config.architectures or ()) or config.model_type
    raise ModelUnsuited(f"{checkpoint.folder}: transformers {transformers.__version__} has no model class {named}")


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that config.json names, else that of most stored bytes; what transformers calls "auto"."""
    text = checkpoint.config.get("text_config")
    for body in (checkpoint.config, text if isinstance(text, dict) else {}):
        named = body.get("dtype", body.get("torch_dtype"))
        if isinstance(named, str):
            return as_dtype(named)
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = DTYPES.get(max(sizes, key=lambda name: sizes[name]))
    return most if most is not None and most.is_floating_point else torch.float32


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype that a name stands for; raises ModelUnsuited for one that no model computes in."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in (torch.bfloat16, torch.float16, torch.float32):
        raise ModelUnsuited(f"dtype {dtype!r} is not one of bfloat16, float16, float32")
    return found


def _empty(model: nn.Module, precision: dict[str, torch.dtype]) -> None:
    """Put a tensor on ``meta`` in the place of every one that a checkpoint holds, in the dtype that it is loaded in.

    Not all are there: some classes make theirs with functions that know no default device. ``precision`` has the dtypes
    by patterns of names, as transformers' own loading reads them. Tied tensors stay one.
    """
    made: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        parent, _, leaf = name.rpartition(".")
        home = model.get_submodule(parent)
        if id(tensor) not in made:
            found = (dtype for pattern, dtype in precision.items() if re.search(pattern.replace("*", ".*"), name))
            empty = torch.empty_like(tensor, dtype=next(found, tensor.dtype), device="meta")
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if leaf in home._parameters else empty
        (home._parameters if leaf in home._parameters else home._buffers)[leaf] = made[id(tensor)]


def make_buffers(model: Any, device: torch.device = CPU) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, …), as the model's own initialisation does."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    fresh: list[tuple[str, torch.Tensor]] = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        if buffer.device.type == "meta":
            parent, _, leaf = name.rpartition(".")
            empty = torch.empty_like(buffer, device="cpu")
            _fill(empty)
            model.get_submodule(parent)._buffers[leaf] = empty
            fresh.append((name, empty))
    model.initialize_weights()
    for name, empty in fresh:
        if _is_unfilled(model.get_buffer(name), empty.dtype):
            raise ModelUnsuited(f"{type(model).__name__} does not compute its buffer {name!r} after it was built")
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[leaf] = buffer.to(device)


def _fill(buffer: torch.Tensor) -> None:
    """Mark a buffer, so that it shows whether anything was computed into it."""
    kind = buffer.dtype
    if kind.is_floating_point or kind.is_complex:
        buffer.fill_(float("nan"))
    else:
        buffer.fill_(True if kind is torch.bool else torch.iinfo(kind).max)


def _is_unfilled(buffer: torch.Tensor, kind: torch.dtype) -> bool:
    """Whether the mark is still there; a table of bools that is True throughout is taken for one."""
    if not buffer.numel():
        return False
    if kind.is_floating_point or kind.is_complex:
        return bool(torch.isnan(buffer).any())
    return bool((buffer == (True if kind is torch.bool else torch.iinfo(kind).max)).all())


def find_stacks(model: nn.Module) -> tuple[tuple[Block, ...], ...]:
    """Return the outermost module lists of blocks that hold a good share of the model's weights."""
    total = _size(model)
    stacks: list[tuple[Block, ...]] = []
    taken: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(prefix) for prefix in taken):
            continue
        children = list(module)
        size = _size(module)
        if _are_blocks(children) and size >= SMALLEST_SHARE * total:
            stacks.append(tuple(Block(f"{name}.{index}", child) for index, child in enumerate(children)))
            taken.append(f"{name}.")
    return tuple(stacks)


def _are_blocks(children: list[nn.Module]) -> bool:
    """At least two of one class; others may stand between them (attention among Mamba). All have to be called."""
    kinds = Counter(type(child) for child in children)
    return max(kinds.values(), default=0) > 1 and all(kind.forward is not nn.Module.forward for kind in kinds)


def _size(module: nn.Module) -> int:
    """Bytes of a module's tensors; packed weights are buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _embeddings(model: Any) -> tuple[tuple[str, nn.Embedding], ...]:
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        return ()
    rows = table.weight.shape[0]
    return tuple(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight.shape[0] == rows
    )


def _head(model: Any) -> tuple[str, nn.Linear | PackedLinear] | None:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear | PackedLinear):
        return None
    return next(((name, module) for name, module in model.named_modules() if module is head), None)
