"""One sample call of a task: its inputs, the call, and all tensors of its result."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers

from pagein.errors import NotResident, SplitBroken
from pagein.parts.adapters import ACTIVE, Adapter, Owner, Selection, adapter_of
from pagein.parts.adapting import make_adaptable
from pagein.parts.splitting.loading import Whole
from pagein.parts.splitting.tasks import Kind, RandomInput, Sample, TaskEntry
from pagein.weights.reading.sources import DTYPES

_DEEPEST = 8


class Calls:
    """Makes the sample calls of the tasks of one model; each is repeatable."""

    def __init__(self, whole: Whole, tasks: Mapping[str, TaskEntry]) -> None:
        self._whole, self._tasks = whole, tasks
        self._tokenizers: dict[str, Any] = {}
        self._adapters = {
            part: adapter_of(part, {name: _tensor(one) for name, one in tensors.items()}, part)
            for part, tensors in whole.adapter_tensors.items()
        }
        self._owner = Owner()
        make_adaptable(whole.model, {name for one in self._adapters.values() for name in one.modules}, self._owner)

    def adapter(self, task: str) -> Adapter | None:
        """The adapter that a task's calls bring."""
        part = self._whole.adapters.get(task)
        return None if part is None else self._adapters[part]

    def run(self, task: str, number: int) -> list[torch.Tensor]:
        """Make one sample call and return its result's tensors; raises SplitBroken, NotResident."""
        entry = self._tasks[task]
        model = self._whole.models[self._whole.keys[task]]
        try:
            function = _function(model, entry)
            inputs = self._inputs(task, model, function, entry.samples[number])
            torch.manual_seed(0)
            with torch.no_grad(), self._with_adapter(task):
                found = function(**inputs, **_options(entry))
        except (NotResident, SplitBroken):
            raise
        except Exception as error:  # whatever a model raises, the sample is to be named
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            raise SplitBroken(f"task {task!r}, sample {number + 1}: {why}", task=task, sample=number + 1) from error
        tensors = list(_flat(found, _DEEPEST))
        if not tensors:
            raise SplitBroken(f"task {task!r}, sample {number + 1}: the call returned no tensor to compare")
        return tensors

    def read(self, task: str, number: int, written: torch.Tensor) -> torch.Tensor:
        """Return the logits at each place of what was written for a sample of kind ``generate``: of the same words,
        whatever would be written now. ``written`` has the prompt in it where the model continues it."""
        entry = self._tasks[task]
        model = self._whole.models[self._whole.keys[task]]
        inputs = {"input_ids": written[:, :-1]}
        if getattr(model.config, "is_encoder_decoder", False):
            given = self._inputs(task, model, model.generate, entry.samples[number])
            inputs = {**given, "decoder_input_ids": written[:, :-1]}
        with torch.no_grad(), self._with_adapter(task):
            logits: torch.Tensor = model(**inputs).logits
        return logits

    @contextmanager
    def _with_adapter(self, task: str) -> Iterator[None]:
        adapter = self.adapter(task)
        token = ACTIVE.set(Selection(self._owner, task, [adapter] if adapter is not None else []))
        try:
            yield
        finally:
            ACTIVE.reset(token)

    def _inputs(self, task: str, model: Any, function: Callable[..., Any], sample: Sample) -> dict[str, Any]:
        if sample.inputs is not None:
            return {name: _value(one, getattr(model, "dtype", torch.float32)) for name, one in sample.inputs.items()}
        if sample.token_ids is not None:
            ids = torch.tensor([sample.token_ids])
            found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            found = dict(self._tokenizer(task)(sample.text, return_tensors="pt"))
        if self._tasks[task].kind is Kind.GENERATE:
            return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}
        takes = inspect.signature(getattr(function, "forward", function)).parameters
        return {name: value for name, value in found.items() if name in takes}

    def _tokenizer(self, task: str) -> Any:
        folder = self._whole.origins[self._whole.keys[task]].folder
        if folder not in self._tokenizers:
            try:
                self._tokenizers[folder] = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError, ImportError, KeyError) as error:
                raise SplitBroken(
                    f"task {task!r} has texts as samples, and {folder} has no tokenizer that can be loaded",
                    hint="give token_ids instead of text",
                ) from error
        return self._tokenizers[folder]


def _function(model: Any, entry: TaskEntry) -> Callable[..., Any]:
    if entry.kind is Kind.GENERATE:
        if not callable(getattr(model, "generate", None)):
            raise SplitBroken(f"{type(model).__name__} cannot generate", hint="give the task another kind or class")
        found: Callable[..., Any] = model.generate
        return found
    place = model
    for name in (entry.call or "").split(".") if entry.call else ():
        place = getattr(place, name, None)
    if not callable(place):
        raise SplitBroken(f"{type(model).__name__} has nothing callable at {entry.call!r}")
    return cast(Callable[..., Any], place)


def _options(entry: TaskEntry) -> dict[str, Any]:
    if entry.kind is not Kind.GENERATE:
        return {}
    steps = {"max_new_tokens": entry.max_new_tokens, "min_new_tokens": entry.max_new_tokens}
    return {**steps, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def _value(given: RandomInput | list[Any], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(given, list):
        found = torch.tensor(given)
        return found.to(dtype) if found.is_floating_point() else found
    generator = torch.Generator().manual_seed(given.seed)
    if given.high is not None:
        return torch.randint(given.low, given.high, given.shape, generator=generator)
    return torch.randn(given.shape, generator=generator).to(dtype)


def _tensor(source: Any) -> torch.Tensor:
    data = bytearray(b"".join(bytes(chunk) for chunk in source.chunks()))
    return torch.frombuffer(data, dtype=DTYPES[source.dtype]).reshape(source.shape)


def _flat(value: Any, left: int) -> Iterator[torch.Tensor]:
    """Yield every tensor of a result; caches, which hold what was computed on the way, are left out."""
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, Mapping) and left:
        for one in value.values():
            yield from _flat(one, left - 1)
    elif isinstance(value, list | tuple) and left:
        for one in value:
            yield from _flat(one, left - 1)
    elif dataclasses.is_dataclass(value) and left:
        for each in dataclasses.fields(value):
            yield from _flat(getattr(value, each.name), left - 1)
