"""Ingredients of the parts engine: a split model with all of its parts, and with as few as it can serve with.

The engine is given its allowance; what is left of it after `beside` is for parts, and idle ones leave for others. So
these figures decide how much it is given, not what it takes. Sources as for the transformers engine, which has the same
process.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagein.catalog.estimate_transformers import CUDA_HOST, MARGIN, RUNTIME, cache_bytes, pass_bytes, process
from pagein.catalog.model import Ingredient, ModelInfo
from pagein.catalog.split.facts import SplitFacts
from pagein.catalog.split.kinds import KINDS
from pagein.catalog.split.names import fold
from pagein.catalog.split.packed import PRECISIONS as PACKED
from pagein.catalog.split.precision import AUTO, FLOATS

WATERMARK = 0.85
"""Share of their bytes above which idle parts leave; below it nothing ever has to. A test keeps it the guard's own."""


def parts(
    info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object], device: str = "cpu"
) -> list[Ingredient]:
    """Everything that a worker takes with all parts in memory, and none that has to leave."""
    sizes = part_sizes(_split(info), options, device)
    pool = "ram" if device == "cpu" else device
    found = [
        Ingredient("parts", sum(sizes.values()), pool),
        Ingredient("room above them", int(sum(sizes.values()) * (1 / WATERMARK - 1)), pool),
        *_beside(info, context, parallel, device),
    ]
    if device != "cpu":
        found += [
            Ingredient("a part that is being loaded", max(sizes.values()), "ram"),
            Ingredient("CUDA", CUDA_HOST, "ram"),
            Ingredient("runtime", RUNTIME, "ram"),
        ]
    return found


def least(
    info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object], device: str = "cpu"
) -> int:
    """Bytes of its pool with which every task can be called, one after the other: the largest one's parts, with the
    backbone among them."""
    split = _split(info)
    largest = _largest_task(split, part_sizes(split, options, device, fewest=True))
    return int((largest + beside(info, context, parallel, device)) * MARGIN)


def beside(info: ModelInfo, context: int | None, parallel: int, device: str) -> int:
    """Bytes of a worker's allowance that no part gets: caches and activations of its requests, and its process."""
    return sum(one.bytes for one in _beside(info, context, parallel, device))


def part_sizes(
    split: SplitFacts, options: Mapping[str, object], device: str = "cpu", *, fewest: bool = False
) -> dict[str, int]:
    """Bytes of each part in the precision that the option ``precision`` asks for, as `split.precision.choose` has it.

    ``fewest``: where that is left to the engine, in the one that it takes when memory is short.
    """
    wanted, chains = options.get("precision"), _chains(split)
    if wanted == AUTO:
        plain = _plain(split, device)
        return min(plain, _packed(split), key=lambda sizes: _largest_task(split, sizes)) if fewest else plain
    sizes: dict[str, int] = {}
    named = {fold(name): form for name, form in wanted.items()} if isinstance(wanted, Mapping) else None
    for name, part in split.parts.items():
        if named is not None:
            form = named.get(name) or next((named[one] for one in chains[name] if one in named), None)
        else:
            able = wanted not in PACKED or all(wanted in split.parts[one].bytes for one in chains[name])
            form = wanted if able else None
        sizes[name] = part.size(form if isinstance(form, str) else None)
    return sizes


def _plain(split: SplitFacts, device: str) -> dict[str, int]:
    """Bytes by the first rule of ``auto``: all in one of the device's own types, or as stored."""
    for one in FLOATS["cpu" if device == "cpu" else "cuda"]:
        if all(one in part.bytes or part.kind in (None, KINDS[one]) for part in split.parts.values()):
            return {name: part.size(one) for name, part in split.parts.items()}
    return {name: part.size() for name, part in split.parts.items()}


def _packed(split: SplitFacts) -> dict[str, int]:
    """Bytes by its second rule when nothing fits: packed in as few bits as there are, all others as stored."""
    sizes: dict[str, int] = {}
    for name, chain in _chains(split).items():
        parts = [split.parts[one] for one in chain]
        forms = [None, *(form for form in PACKED if all(form in part.bytes for part in parts))]
        form = min(forms, key=lambda one: max(part.size(one) for part in parts))
        sizes[name] = split.parts[name].size(form)
    return sizes


def _largest_task(split: SplitFacts, sizes: Mapping[str, int]) -> int:
    """Bytes of the parts of that task which has most, each the largest of those that can stand in its place."""
    chains = _chains(split)
    largest = {name: max(sizes[one] for one in chains[name]) for name in split.parts}
    return max(sum(largest[name] for name in task.parts) for task in split.tasks.values())


def _chains(split: SplitFacts) -> dict[str, list[str]]:
    """Return for each part those that stand in each other's place with it."""
    roots: dict[str, list[str]] = {}
    root_of: dict[str, str] = {}
    for name in split.parts:
        root = name
        while (before := split.parts[root].replaces) is not None:
            root = before
        root_of[name] = root
        roots.setdefault(root, []).append(name)
    return {name: roots[root] for name, root in root_of.items()}


def _beside(info: ModelInfo, context: int | None, parallel: int, device: str) -> list[Ingredient]:
    pool, tokens = "ram" if device == "cpu" else device, context or info.context_train or 0
    writes = any(task.kind == "generate" for task in _split(info).tasks.values())
    return [
        Ingredient("KV", cache_bytes(info, context, parallel) if writes else 0, pool),
        Ingredient("activations", parallel * pass_bytes(info, tokens, whole=True), pool),
        process(device),
    ]


def _split(info: ModelInfo) -> SplitFacts:
    assert info.split is not None, info.path
    return info.split
