"""Which bytes of the checkpoint each tensor of the model is made of.

transformers renames tensors, and stacks, joins or splits some, when it loads. Its own rules are asked, never copied:
names go through its renaming, and what moves rows about is run once on row *numbers*, so that what comes out tells
which rows go where. Rules that do more than move rows are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pagein.errors import BadModelFile, ModelUnsuited
from pagein.weights.reading.checkpoint import Checkpoint, StoredTensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""torch's dtype for each dtype of safetensors that it has one for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one stored tensor, and the byte of the model's tensor where it goes."""

    tensor: StoredTensor
    start: int
    nbytes: int
    into: int


@dataclass(frozen=True, slots=True)
class Source:
    """What one tensor of the model is made of: its pieces fill it in order, without a hole."""

    name: str
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    """As stored."""

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole(self) -> StoredTensor | None:
        """The one stored tensor that this is, byte for byte; None where it is put together."""
        piece = self.pieces[0]
        return piece.tensor if len(self.pieces) == 1 and piece.nbytes == piece.tensor.nbytes else None


def find_sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    """Map every persistent tensor of a model on ``meta`` that the checkpoint has to its bytes.

    Raises BadModelFile where a shape differs, ModelUnsuited where loading does more than move rows.
    """
    wanted: dict[str, torch.Tensor] = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Source] = {}
    groups: dict[tuple[int, str], dict[str, list[StoredTensor]]] = {}
    for tensor in sorted(checkpoint.tensors.values(), key=lambda item: _natural(item.name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and tensor.name in wanted:
            name, pattern = tensor.name, None
        if name not in wanted:
            continue  # transformers leaves such tensors too (an optimiser's, another head's)
        if pattern is None:
            found[name] = Source(name, (Piece(tensor, 0, tensor.nbytes, 0),), _dtype(tensor))
        else:
            rule = by_pattern[pattern]
            groups.setdefault((id(rule), name), {}).setdefault(pattern, []).append(tensor)
    rules_by_id = {id(rule): rule for rule in converters}
    for (rule_id, name), group in groups.items():
        found.update(_by_rows(model, rules_by_id[rule_id], name, group, wanted))
    for name, source in found.items():
        _check_shape(source, wanted[name])
    _add_twins(found, model, checkpoint)
    return found


def _add_twins(found: dict[str, Source], model: Any, checkpoint: Checkpoint) -> None:
    """Give a tied tensor that the checkpoint holds once its twin's source; raises BadModelFile for a missing one."""
    kept = model.state_dict(keep_vars=True)
    by_tensor = {id(kept[name]): source for name, source in found.items()}
    missing = [name for name in kept if name not in found and id(kept[name]) not in by_tensor]
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BadModelFile(
            f"{checkpoint.folder}: {len(missing)} of the {len(kept)} tensors of {type(model).__name__} are missing: "
            f"{some}",
            hint="the download is not complete, or config.json belongs to another model",
        )
    for name, tensor in kept.items():
        found.setdefault(name, by_tensor.get(id(tensor), found.get(name)))  # type: ignore[arg-type]


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _dtype(tensor: StoredTensor) -> torch.dtype:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ModelUnsuited(
            f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}, which torch does not compute"
        )
    return dtype


def _by_rows(
    model: Any, rule: Any, name: str, group: Mapping[str, list[StoredTensor]], wanted: Mapping[str, torch.Tensor]
) -> dict[str, Source]:
    """Run a rule on row numbers: each stored tensor of shape [..., k] becomes numbers of shape [..., 1]."""
    stored = [tensor for tensors in group.values() for tensor in tensors]
    if len({tensor.dtype for tensor in stored}) > 1:
        raise ModelUnsuited(f"{name!r} is put together from dtypes {sorted({tensor.dtype for tensor in stored})}")
    first: list[int] = [0]
    numbered: dict[str, list[torch.Tensor]] = {}
    for pattern, tensors in group.items():
        for tensor in tensors:
            shape = (*tensor.shape[:-1], 1)
            rows = reduce(mul, shape, 1)
            numbered.setdefault(pattern, []).append(torch.arange(first[-1], first[-1] + rows).reshape(shape))
            first.append(first[-1] + rows)
    result: dict[str, Any] = dict(numbered)
    try:
        for operation in rule.operations:
            result = operation.convert(
                result, source_patterns=rule.source_patterns, target_patterns=rule.target_patterns,
                full_layer_name=name, model=model, config=model.config, missing_keys=None,
            )  # fmt: skip
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise _unsuited(name, rule) from error
    sources: dict[str, Source] = {}
    for target, moved in _full_names(name, result).items():
        if target not in wanted:
            continue
        numbers = moved[0] if isinstance(moved, list) else moved
        shape = wanted[target].shape
        if numbers.shape[:-1] != shape[:-1] or numbers.shape[-1] != 1:
            raise _unsuited(target, rule)
        sources[target] = Source(target, _pieces(numbers.reshape(-1), stored, first), _dtype(stored[0]))
    return sources


def _unsuited(name: str, rule: Any) -> ModelUnsuited:
    steps = ", ".join(type(operation).__name__ for operation in rule.operations)
    return ModelUnsuited(
        f"the tensor {name!r} is converted while it is loaded ({steps}), which cannot be done while it is streamed",
        hint="load it once with transformers and save it again, or choose another checkpoint of it",
    )


def _full_names(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    full = name.replace("*.", "0.")
    parts = next((full.partition(key) for key in result if key in full), None)
    return dict(result) if parts is None else {parts[0] + key + parts[2]: value for key, value in result.items()}


def _pieces(numbers: torch.Tensor, stored: list[StoredTensor], first: list[int]) -> tuple[Piece, ...]:
    """Join row numbers that follow each other, within one stored tensor, to runs of bytes."""
    jumps = torch.nonzero(numbers[1:] != numbers[:-1] + 1).flatten() + 1
    starts = sorted({0, *jumps.tolist(), *_crossings(numbers, first)})
    ends = [*starts[1:], numbers.numel()]
    pieces: list[Piece] = []
    into = 0
    owner = torch.searchsorted(torch.tensor(first), numbers[torch.tensor(starts)], right=True) - 1
    for start, end, which in zip(starts, ends, owner.tolist(), strict=True):
        tensor = stored[which]
        row = tensor.nbytes // (first[which + 1] - first[which])
        pieces.append(Piece(tensor, (int(numbers[start]) - first[which]) * row, (end - start) * row, into))
        into += (end - start) * row
    return tuple(pieces)


def _crossings(numbers: torch.Tensor, first: list[int]) -> list[int]:
    owner = torch.searchsorted(torch.tensor(first), numbers, right=True)
    crossings: list[int] = (torch.nonzero(owner[1:] != owner[:-1]).flatten() + 1).tolist()
    return crossings


def _check_shape(source: Source, wanted: torch.Tensor) -> None:
    whole = source.whole
    if whole is not None and tuple(wanted.shape) != whole.shape:
        raise BadModelFile(
            f"{whole.file}: tensor {whole.name!r} has shape {list(whole.shape)}, the model of config.json wants "
            f"{list(wanted.shape)}",
            path=str(whole.file),
        )
