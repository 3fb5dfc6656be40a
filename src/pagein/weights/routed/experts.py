"""Mixture of experts: only the experts that tokens are sent to are read.

Found by structure, not by a list of architectures. A module that holds its experts as tensors [experts, rows, columns]
and computes by transformers' interface of experts keeps its own forward; its tensors are stand-ins that hand out one
expert's matrix at a time. So its results are, bit for bit, those of the same implementation over the whole tensors.
Experts that are modules of their own get their tensors when they are called. All others are read whole, with their
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pagein.weights.planning.demand import Experts
from pagein.weights.reading.reader import Reader
from pagein.weights.reading.sources import Source
from pagein.weights.routed.expert_cache import Pool, PoolCounts, Share, divide, shares_of
from pagein.weights.routed.routed_tensor import RoutedTensor
from pagein.weights.streaming.stage import Stage
from pagein.weights.streaming.structure import Structure

MOST_PIECES = 64
"""Runs of bytes that one expert's matrix is put together from; more would be copied for longer than they are read."""


@dataclass(slots=True)
class _Stack:
    """One tensor of the experts of a block, expert by expert."""

    leaf: str
    names: list[str]
    """Of the model's tensors: one for all experts, or one for each."""
    homes: list[dict[str, Any]]
    """The ``_parameters`` where they hang, likewise."""
    placeholder: torch.Tensor
    shape: torch.Size
    """Of one expert's matrix."""
    shares: list[Share]
    pool: Pool = field(init=False)
    block: int = field(init=False)
    """Place of this block in the pool."""


@dataclass(slots=True)
class _Group:
    """The experts of one block."""

    module: nn.Module
    stacks: list[_Stack]
    experts: int


class RoutedExperts:
    """All routed experts of a model, and the cache that they are computed from."""

    def __init__(self, structure: Structure, sources: Mapping[str, Source], active: int | None, stage: Stage) -> None:
        self.notes: list[str] = []
        """Which experts are read whole, and why."""
        self.pools: list[Pool] = []
        self._active, self._stage = active, stage
        counts = _expert_counts(structure.model.config)
        self._groups = [
            group for block in structure.blocks for group in self._find(block.name, block.module, sources, counts)
        ]
        self._make_pools()
        for group in self._groups:
            _hook_modules(group) if _is_listed(group.module) else _hook_tensors(group)

    @property
    def names(self) -> set[str]:
        """Tensors of the model that are no block's any more."""
        return {name for group in self._groups for stack in group.stacks for name in stack.names}

    @property
    def needs(self) -> Experts | None:
        """What the planner has to know; None where the model has no experts that can be read one by one."""
        if not self.pools:
            return None
        fixed = sum(pool.fixed_bytes for pool in self.pools)
        active = 0
        for group in self._groups:
            read = sum(share.read_bytes for stack in group.stacks for share in stack.shares)
            active += read * min(self._active or group.experts, group.experts) // group.experts
        return Experts(
            total=fixed + sum(pool.most * pool.slot_bytes for pool in self.pools),
            per_token=active,
            least=fixed + sum(pool.least * pool.slot_bytes for pool in self.pools),
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that matrices pass through on their way to a device of its own."""
        return sum(pool.host_bytes for pool in self.pools)

    @property
    def counts(self) -> PoolCounts:
        """What was asked of all pools since the start."""
        of = [pool.counts for pool in self.pools]
        return PoolCounts(
            sum(one.uses for one in of),
            sum(one.hits for one in of),
            sum(one.nbytes for one in of),
            sum(one.waited for one in of),
        )

    def resize(self, reader: Reader, nbytes: int) -> None:
        """Give the cache so many bytes. It stays filled where that changes nothing, and else begins empty."""
        if not self.pools:
            return
        slots = list(divide(self.pools, nbytes))
        if slots == [pool.slots for pool in self.pools]:
            return
        self.close()
        self._stage.trim()
        for pool, count in zip(self.pools, slots, strict=True):
            pool.open(reader, count)

    def fill(self) -> None:
        """Read all experts, where there is room for all."""
        if all(pool.slots == pool.most for pool in self.pools):
            for pool in self.pools:
                pool.fill()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for pool in self.pools:
            pool.close()

    def _find(self, prefix: str, block: nn.Module, sources: Mapping[str, Source], counts: set[int]) -> Iterator[_Group]:
        for path, module in block.named_modules(prefix=prefix):
            stacks: list[_Stack] = []
            experts = 0
            if _has_interface(module):
                experts = int(module.num_experts)
                stacks = _stacked(path, module, sources, experts)
            elif _is_listed(module) and len(_members(module)) in counts:
                experts = len(_members(module))
                stacks = _listed(path, module, sources)
            elif any(_is_stack(tensor, count) for tensor in module._parameters.values() for count in counts):
                self._note(module, "its forward is not known to use one expert after another")
            if any(len(share.pieces) > MOST_PIECES for stack in stacks for share in stack.shares):
                self._note(module, f"each is scattered over more than {MOST_PIECES} places of the checkpoint")
            elif stacks:
                yield _Group(module, stacks, experts)

    def _note(self, module: nn.Module, why: str) -> None:
        note = f"experts of {type(module).__name__} are read whole with their blocks: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def _make_pools(self) -> None:
        alike: dict[tuple[str, torch.Size, torch.dtype], list[tuple[_Group, _Stack]]] = {}
        for group in self._groups:
            for stack in group.stacks:
                alike.setdefault((stack.leaf, stack.shape, stack.placeholder.dtype), []).append((group, stack))
        for (_, shape, dtype), members in alike.items():
            active = self._active or max(group.experts for group, _ in members)
            apart = None if self._stage.alignment is None else self._stage.device
            pool = Pool([stack.shares for _, stack in members], shape, dtype, active, apart)
            self.pools.append(pool)
            for block, (_, stack) in enumerate(members):
                stack.pool, stack.block = pool, block


def _expert_counts(config: Any) -> set[int]:
    """Return every number of experts that a config names."""
    bodies = (config, config.get_text_config())
    named = ((name, value) for body in bodies for name, value in vars(body).items() if "expert" in name)
    return {value for _, value in named if isinstance(value, int) and not isinstance(value, bool) and value > 1}


def _has_interface(module: nn.Module) -> bool:
    """Whether a module computes by transformers' interface of experts, which marks each class so."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")


def _is_listed(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children with weights; a dropout may stand among experts."""
    return [(key, child) for key, child in module.named_children() if next(child.parameters(), None) is not None]


def _is_stack(tensor: torch.Tensor | None, experts: int) -> bool:
    return tensor is not None and tensor.dim() == 3 and tensor.shape[0] == experts


def _stacked(path: str, module: nn.Module, sources: Mapping[str, Source], experts: int) -> list[_Stack]:
    found: list[_Stack] = []
    for leaf, tensor in module._parameters.items():
        source = sources.get(f"{path}.{leaf}")
        if tensor is not None and source is not None and _is_stack(tensor, experts):
            shares = shares_of(source, experts, tensor.dtype)
            found.append(_Stack(leaf, [source.name], [module._parameters], tensor, tensor.shape[1:], shares))
    return found


def _listed(path: str, module: nn.Module, sources: Mapping[str, Source]) -> list[_Stack]:
    children = _members(module)
    leaves = [{name: tensor.shape for name, tensor in child.named_parameters()} for _, child in children]
    if any(one != leaves[0] for one in leaves):
        return []
    found: list[_Stack] = []
    for name in leaves[0]:
        owner = name.rpartition(".")[0]
        names = [f"{path}.{key}.{name}" for key, _ in children]
        if any(one not in sources for one in names):
            return []
        homes = [child.get_submodule(owner)._parameters for _, child in children]
        tensor = children[0][1].get_parameter(name)
        shares = [share for one in names for share in shares_of(sources[one], 1, tensor.dtype)]
        found.append(_Stack(name, [sources[one].name for one in names], homes, tensor, tensor.shape, shares))
    return found


def _hook_tensors(group: _Group) -> None:
    """Put stand-ins into the module, and begin to read what a pass needs as soon as its routing is known."""
    for stack in group.stacks:
        stack.homes[0][stack.leaf] = RoutedTensor.stand_in(stack.placeholder, stack.pool, stack.block)

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        routing = named.get("top_k_index", inputs[1] if len(inputs) > 1 else None)
        if not isinstance(routing, torch.Tensor) or routing.is_floating_point():
            return
        hit = [expert for expert in torch.unique(routing).tolist() if 0 <= expert < group.experts]
        for stack in group.stacks:
            stack.pool.fetch(stack.block, hit)

    group.module.register_forward_pre_hook(before, with_kwargs=True)


def _hook_modules(group: _Group) -> None:
    """Give each expert its tensors while it computes."""
    for expert, (_, child) in enumerate(_members(group.module)):
        child.register_forward_pre_hook(_Hang(group, expert))
        child.register_forward_hook(_TakeAway(group, expert), always_call=True)


class _Hang:
    """Before an expert that is a module computes."""

    def __init__(self, group: _Group, expert: int) -> None:
        self._stacks, self._expert = group.stacks, expert

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        for stack in self._stacks:
            stack.pool.fetch(stack.block, [self._expert])
        for stack in self._stacks:
            matrix = stack.pool.take(stack.block, self._expert)
            leaf = stack.leaf.rpartition(".")[2]
            stack.homes[self._expert][leaf] = nn.Parameter(matrix, requires_grad=False)


class _TakeAway:
    """After an expert that is a module has computed."""

    def __init__(self, group: _Group, expert: int) -> None:
        self._stacks, self._expert = group.stacks, expert

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for stack in self._stacks:
            stack.homes[self._expert][stack.leaf.rpartition(".")[2]] = stack.placeholder
