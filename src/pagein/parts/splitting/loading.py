"""The whole model that is to be split, from its folders: one, or several that were fine-tuned from one backbone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn

from pagein.catalog.split.names import LONGEST
from pagein.errors import BadModelFile, ModelUnsuited, SplitBroken
from pagein.parts.composed import PREFIX, Sharing, TaskModels
from pagein.parts.splitting.analysis import Analysis, Origin
from pagein.parts.splitting.making import SourceTensor, digests
from pagein.parts.splitting.peft import adapter_digest, read_adapter
from pagein.parts.splitting.tasks import CLASSES, TaskEntry, TaskMapping
from pagein.weights.packed.shard_file import ALIGNED
from pagein.weights.reading.checkpoint import Checkpoint, open_checkpoint
from pagein.weights.reading.sources import DTYPES

Say = Callable[..., None]


@dataclass
class Whole:
    """All of it in memory, with which model and adapter each task calls."""

    model: nn.Module
    """The one model, or `TaskModels`."""
    models: dict[str, Any]
    """By key."""
    origins: dict[str, Origin]
    keys: dict[str, str]
    """Of each task."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Task → adapter part."""
    adapter_origins: dict[str, Origin] = field(default_factory=dict)
    adapter_tensors: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)
    """By adapter part."""
    sharing: Sharing = field(default_factory=Sharing)

    def prefix(self, task: str) -> str:
        """Return what the names of tensors of a task's model begin with."""
        return f"{PREFIX}{self.keys[task]}." if len(self.models) > 1 else ""

    @property
    def class_name(self) -> str:
        """What a plan names as the model's class."""
        return type(self.model).__name__


def load_whole(folder: Path, mapping: TaskMapping, say: Say) -> Whole:
    """Load what the tasks need; raises BadModelFile, ModelUnsuited, SplitBroken. Bit-identical tensors become one."""
    wanted = {
        name: class_of(Path(entry.folder) if entry.folder else folder, entry) for name, entry in mapping.tasks.items()
    }
    keys: dict[tuple[Path, str], str] = {}
    for name, (home, kind) in wanted.items():
        keys.setdefault((home, kind), _key(name, keys.values()))
    whole = _load({key: (home, kind) for (home, kind), key in keys.items()}, say)
    whole.keys = {name: keys[place] for name, place in wanted.items()}
    parts: dict[Path, str] = {}
    for name, entry in mapping.tasks.items():
        if entry.adapter is not None:
            home = Path(entry.adapter).resolve()
            whole.adapters[name] = parts.setdefault(home, _adapter_name(name, mapping))
    whole = _finished(whole, {part: home for home, part in parts.items()})
    align(whole.model)
    return whole


def align(model: nn.Module) -> None:
    """Let every tensor begin where parts let theirs begin: at multiples of 64 bytes.

    Matrix products of one row give other last bits where weights begin elsewhere (MKL, torch 2.13), as those that are
    mapped from a file do: without this a proof would compare with numbers that no split can give.
    """
    for tensor in {id(one): one for one in model.state_dict(keep_vars=True).values()}.values():
        if tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()


def load_again(analysis: Analysis, say: Say) -> Whole:
    """Load the same again; raises SplitBroken where a file is not what was analysed."""
    whole = _load({key: (Path(one.folder), one.class_name) for key, one in analysis.models.items()}, say)
    whole.keys = {name: task.model for name, task in analysis.tasks.items()}
    whole.adapters = {name: task.adapter for name, task in analysis.tasks.items() if task.adapter is not None}
    whole = _finished(whole, {part: Path(one.folder) for part, one in analysis.adapters.items()})
    for before, now in ((analysis.models, whole.origins), (analysis.adapters, whole.adapter_origins)):
        for name, origin in before.items():
            if now[name].files != dict(origin.files):
                changed = min(set(origin.files.items()) ^ set(now[name].files.items()))[0]
                why = f"{origin.folder}: {changed} is not what was analysed"
                raise SplitBroken(why, hint="analyse the model again: pagein split analyze")
    return whole


def class_of(folder: Path, entry: TaskEntry) -> tuple[Path, str]:
    """Return a task's folder and the class of its model; raises BadModelFile, ModelUnsuited."""
    checkpoint = open_checkpoint(folder)
    if "auto_map" in checkpoint.config:
        raise ModelUnsuited(f"{folder}: the model brings code of its own (auto_map in config.json), which is never run")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if entry.model_class is not None:
        auto = getattr(transformers, CLASSES[entry.model_class])
        found = auto._model_mapping.get(type(config), None)
        if found is None:
            raise ModelUnsuited(f"{folder}: transformers has no {entry.model_class} of {config.model_type}")
        return folder.resolve(), (found[0] if isinstance(found, tuple) else found).__name__
    name = next((one for one in config.architectures or () if hasattr(transformers, one)), None)
    if name is None:
        hint = f"give the task a `class`: {', '.join(CLASSES)}"
        raise ModelUnsuited(f"{folder}: config.json names no class that transformers has", hint=hint)
    return folder.resolve(), name


def tensor_source(tensor: torch.Tensor, name: str) -> SourceTensor:
    """Return a tensor in memory as a split's source."""
    kind = next((known for known, dtype in DTYPES.items() if dtype == tensor.dtype), None)
    if kind is None:
        raise ModelUnsuited(f"the tensor {name!r} is {tensor.dtype}, which a file of parts cannot hold")

    def chunks() -> Iterable[memoryview]:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        step = 8 * 1024**2
        for start in range(0, flat.numel(), step):
            yield memoryview(flat[start : start + step].numpy())

    return SourceTensor(kind, tuple(tensor.shape), chunks)


def _load(places: Mapping[str, tuple[Path, str]], say: Say) -> Whole:
    models: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    sharing = Sharing()
    for number, (key, (folder, kind)) in enumerate(places.items()):
        say("loading", model=key, folder=str(folder), number=number + 1, of=len(places))
        checkpoint = open_checkpoint(folder)
        models[key] = _load_one(checkpoint, kind)
        origins[key] = Origin(str(folder), kind, digests(checkpoint))
        if len(places) > 1:
            sharing.add(key, models[key])
    return Whole(next(iter(models.values())), models, origins, {}, sharing=sharing)


def _load_one(checkpoint: Checkpoint, kind: str) -> Any:
    """Return the ordinary model as transformers loads it; nothing of it may be made up."""
    folder = checkpoint.folder
    found = getattr(transformers, kind, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ModelUnsuited(f"transformers {transformers.__version__} has no model class {kind[:80]!r}")
    try:
        model, told = cast(Any, found).from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise BadModelFile(f"{folder}: transformers cannot load it as {kind}: {_first_line(error)}") from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise BadModelFile(
            f"{folder}: {len(missing)} tensors of {kind} are not there, {missing[0]!r} the first: transformers would "
            f"make them up at random",
            hint="give the folder that was fine-tuned for this task, or the `class` that it was saved as",
        )
    return model.eval()


def _finished(whole: Whole, adapters: Mapping[str, Path]) -> Whole:
    """Put several models into one, and read the adapters by their modules' names in it."""
    if len(whole.models) > 1:
        whole.model = TaskModels(whole.models, whole.keys).eval()
    for part, folder in adapters.items():
        task = next(task for task, adapter in whole.adapters.items() if adapter == part)
        whole.adapter_tensors[part] = read_adapter(folder, part, whole.prefix(task))
        whole.adapter_origins[part] = Origin(str(folder), "LORA", adapter_digest(folder))
    return whole


def _key(task: str, taken: Iterable[str]) -> str:
    """Return the key of a model by the first task that calls it: a plain name of a folder and of an attribute."""
    key = re.sub(r"[^a-z0-9_]", "_", task)
    while key in set(taken) or hasattr(nn.ModuleDict, key):
        key += "_"
    return key


def _adapter_name(task: str, mapping: TaskMapping) -> str:
    name = f"{task[: LONGEST - 8]}.adapter"
    if name in mapping.tasks:
        raise SplitBroken(f"a task is called {name!r}, as the adapter of {task!r} would be", hint="rename one of them")
    return name


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
