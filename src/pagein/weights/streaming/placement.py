"""Carries a plan out: which parts of the model are in memory, which pass through the ring, and from plan to plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from pagein.errors import WeightsAway
from pagein.memory.buffers import Buffer
from pagein.weights.planning.demand import Unit
from pagein.weights.planning.plan import HEAD_ROWS, HeadPlace, Plan
from pagein.weights.reading.layout import PAGE
from pagein.weights.reading.reader import Reader
from pagein.weights.reading.sources import Source
from pagein.weights.routed.experts import RoutedExperts
from pagein.weights.steps.lockstep import Lockstep
from pagein.weights.streaming.binding import Binding, Bound, bindings_of
from pagein.weights.streaming.head import TiledHead, cut_rows, rows_of, straighten
from pagein.weights.streaming.lookup import GatheredRows
from pagein.weights.streaming.stage import Stage
from pagein.weights.streaming.stream import AWAY, Gate, Stream
from pagein.weights.streaming.structure import Structure

Progress = Callable[[int, int], None]
"""Told bytes loaded and bytes in all."""


class Resident:
    """One part of the model that stays: its tensors and the buffer that they lie in."""

    def __init__(self, bound: Bound, reader: Reader, stage: Stage) -> None:
        self.bound = bound
        buffer = Buffer(bound.nbytes)
        reading = reader.read(bound.layout.extents, buffer)
        try:
            reading.wait()
            flat, self._buffer = stage.keep(buffer, bound)
        except BaseException:
            reader.cancel(reading)
            buffer.close()
            raise
        bound.attach(flat, id(self))

    def drop(self) -> None:
        """Give its memory back; the model holds placeholders again."""
        self.bound.detach()
        self.bound.forget()
        if self._buffer is not None:
            self._buffer.close()


class Placement:
    """Where every part of one model is."""

    def __init__(
        self,
        structure: Structure,
        sources: Mapping[str, Source],
        reader: Reader,
        experts: RoutedExperts,
        stage: Stage,
    ) -> None:
        self.structure, self.sources, self.reader, self.stage = structure, sources, reader, stage
        self._tables = {name: module.weight for name, module in structure.embeddings}
        """The placeholders of the vocabulary tables."""
        self._head_weight = None if structure.head is None else structure.head[1]._parameters.get("weight")
        """The placeholder of the head; a tied table has the same."""
        self._tiled: nn.Module | None = None
        self.is_away = True
        """Whether the model cannot compute: before it was loaded, at rest, after a load that failed."""
        self.lockstep = Lockstep()
        self.stream: Stream | None = None
        self.experts = experts
        self._apart = experts.names
        """Tensors that are no unit's: routed experts, which are read one by one."""
        self.blocks = [self._bound(block.name, block.module) for block in structure.blocks]
        self._gates = [Gate(block.module, self._enter, self._leave) for block in structure.blocks]
        self.head = None if structure.head is None else self._bound(*structure.head)
        if structure.head is not None:
            structure.head[1].register_forward_pre_hook(straighten)
        self.small = self._rest()
        self._residents: dict[str, Resident] = {}
        self._rows: list[GatheredRows] = []
        self._tile_gates: list[Gate] = []
        structure.model.register_forward_pre_hook(self._between)

    def _bound(self, name: str, module: nn.Module) -> Bound:
        every = bindings_of(name, module, self.sources)
        bindings = [one for one in every if one.source.name not in self._apart]
        return Bound(name, bindings, self.stage.alignment)

    def _table(self, name: str) -> Bound:
        """A vocabulary table alone; what else its module holds (a norm, say) is among the rest."""
        tensors, source = dict(self.structure.embeddings)[name]._parameters, self.sources[f"{name}.weight"]
        return Bound(name, [Binding(tensors, "weight", self._tables[name], source)], self.stage.alignment)

    def _rest(self) -> Bound:
        """All that is in no block, no vocabulary table and not the head."""
        parts = [self.structure.head[1]] if self.structure.head else []
        parts += [block.module for block in self.structure.blocks]
        taken = {id(tensors) for part in parts for m in part.modules() for tensors in (m._parameters, m._buffers)}
        tables = {id(module._parameters) for _, module in self.structure.embeddings}
        bindings = [
            one
            for one in bindings_of("", self.structure.model, self.sources)
            if id(one.tensors) not in taken and not (id(one.tensors) in tables and one.leaf == "weight")
        ]
        return Bound("rest", bindings, self.stage.alignment)

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """The placeholders of the vocabulary tables that the head is none of, each once."""
        distinct: dict[int, tuple[str, nn.Parameter]] = {}
        for name, table in self._tables.items():
            if table is not self._head_weight:
                distinct.setdefault(id(table), (name, table))
        return dict(distinct.values())

    @property
    def units(self) -> tuple[Unit, ...]:
        """The blocks as the planner counts them."""
        grain = self.stage.grain
        return tuple(
            Unit(bound.name, bound.layout.read_bytes, -(-bound.nbytes // grain) * grain) for bound in self.blocks
        )

    def staging(self, plan: Plan) -> dict[str, int]:
        """Return what a plan takes of the host's memory on the way to a device of its own; nothing on a CPU."""
        if self.stage.alignment is None:
            return {}
        largest = max(bound.nbytes for bound in (*self.blocks, self.small, *([self.head] if self.head else [])))
        parts = {
            f"{plan.slots} page-locked buffers": plan.slots * plan.slot_bytes,
            "a part that is being loaded": max(largest, plan.needs.embedding if plan.embedding_resident else 0),
            "experts on their way": self.experts.host_bytes,
        }
        return {name: size for name, size in parts.items() if size}

    def apply(self, plan: Plan, progress: Progress | None = None) -> None:
        """Bring the model into the state that a plan wants: first what leaves, then what comes."""
        wanted = {
            "rest": self.small,
            **{self.blocks[index].name: self.blocks[index] for index in sorted(plan.resident)},
        }
        if plan.head is HeadPlace.RESIDENT and self.head is not None:
            wanted["head"] = self.head
        if plan.embedding_resident and not self.structure.tied:
            wanted.update({name: self._table(name) for name in self.tables})
        self._end_stream()
        kept, tiles = self._tile_head(plan)
        wanted.update({bound.name: bound for bound in kept})
        for name in [name for name in self._residents if name not in wanted or wanted[name] in kept]:
            self._residents.pop(name).drop()  # rows of a head that was tiled before are those of other tiles
        self.stage.trim()
        self.experts.resize(self.reader, plan.expert_cache)
        total = sum(bound.nbytes for bound in wanted.values())
        done = 0
        for name, bound in wanted.items():
            if name not in self._residents and bound.bindings:
                self._residents[name] = Resident(bound, self.reader, self.stage)
            done += bound.nbytes
            if progress is not None:
                progress(done, total)
        self.experts.fill()
        self._put_embeddings(plan)
        self._begin_stream(plan, tiles)

    def _put_embeddings(self, plan: Plan) -> None:
        """Give each vocabulary table the resident tensor that it is tied to, or let it gather its rows."""
        there: dict[int, nn.Parameter | None] = {}
        if self.structure.head is not None and plan.head is HeadPlace.RESIDENT:
            there[id(self._head_weight)] = self.structure.head[1]._parameters.get("weight")
        for name, module in self.structure.embeddings:
            if name in self._residents:
                there[id(self._tables[name])] = module._parameters["weight"]
        for name, module in self.structure.embeddings:
            held = there.get(id(self._tables[name]))
            module._parameters["weight"] = self._tables[name] if held is None else held
            if held is None:
                source = self.sources[f"{name}.weight"]
                self._rows.append(GatheredRows(module, source, self.stage.device, self.reader.stamps))

    def _begin_stream(self, plan: Plan, tiles: list[Bound]) -> None:
        away = [index for index in range(len(self.blocks)) if index not in plan.resident]
        units = [self.blocks[index] for index in away] + tiles
        if units:
            self._open_stream(plan, units, away)
        for gate in self._gates:
            gate.unit = None
        for place, index in enumerate(away):
            self._gates[index].unit = place
        for place, gate in enumerate(self._tile_gates, start=len(away)):
            gate.unit = place
        self.is_away = False

    def _open_stream(self, plan: Plan, units: list[Bound], away: list[int]) -> None:
        size = max(plan.slot_bytes, *(unit.nbytes for unit in units))
        self.stream = Stream(self.reader, self.stage, units, self._follows(away, len(units)), plan.slots, size)
        ring, count = self.stream.ring, len(units)
        self.lockstep.serve(self.stream.open, self.stream.close_unit, lambda unit: (unit - ring.expected) % count)
        ring.read_ahead()

    def _follows(self, away: list[int], count: int) -> list[int]:
        """The unit after each: on through the stacks, and from the end back to the start of the last stack."""
        sizes = [len(stack) for stack in self.structure.stacks]
        last_begins = len(self.blocks) - sizes[-1]
        again = next((place for place, index in enumerate(away) if index >= last_begins), len(away))
        return [*(after for _, after in pairwise(range(count))), again if again < count else 0]

    def _tile_head(self, plan: Plan) -> tuple[list[Bound], list[Bound]]:
        """Put tiles in the place of a head that does not fit: those whose rows stay, and those that stream."""
        if plan.head is not HeadPlace.TILED or self.structure.head is None or self.head is None:
            return [], []
        name, head = self.structure.head
        kept = self._kept_rows(plan, head.out_features)
        most = plan.slot_bytes * head.out_features // self.head.nbytes
        tiled = TiledHead(head, [*([kept] if kept else []), *cut_rows(head.out_features - kept, most)])
        tiled.register_forward_pre_hook(straighten)
        _swap(self.structure.model, head, tiled)
        self._tiled = tiled
        bounds = []
        for start, tile in zip(tiled.starts, tiled.tiles, strict=True):
            sources = {
                leaf: rows_of(self.sources[f"{name}.{leaf}"], head.out_features, start, tile.out_features)
                for leaf in tile.state_dict()
            }
            label = f"{name}[{start}:{start + tile.out_features}]"
            bounds.append(Bound(label, bindings_of("", tile, sources), self.stage.alignment))
        first = 1 if kept else 0
        self._tile_gates = [Gate(tile, self._enter, self._leave) for tile in list(tiled.tiles)[first:]]
        return bounds[:first], bounds[first:]

    def _kept_rows(self, plan: Plan, rows: int) -> int:
        """Rows of a tiled head that stay in the bytes that the plan gives them."""
        assert self.head is not None
        # Each tensor's rows begin and end within a page, and a device gives memory in grains.
        room = plan.head_kept_bytes - 2 * PAGE * len(self.head.bindings) - (self.stage.grain - 1)
        there = min(room * rows // self.head.nbytes, rows - HEAD_ROWS)
        return max(there, 0) // HEAD_ROWS * HEAD_ROWS

    def _end_stream(self) -> None:
        self.is_away = True
        for gate in self._gates:
            gate.unit = AWAY
        for gate in self._tile_gates:
            gate.remove()
        self._tile_gates = []
        for rows in self._rows:
            rows.remove()
        self._rows = []
        if self.structure.head is not None and self._tiled is not None:
            _swap(self.structure.model, self._tiled, self.structure.head[1])
            self._tiled = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def check(self) -> None:
        """Raise WeightsAway where the model cannot compute."""
        if self.is_away:
            name = type(self.structure.model).__name__
            raise WeightsAway(f"the weights of {name} are not in memory: it was closed, is at rest, or a load failed")

    def _enter(self, unit: int) -> None:
        self.check()
        assert self.stream is not None
        if not self.lockstep.stop_at(unit):
            self.stream.open(unit)

    def _leave(self, unit: int) -> None:
        assert self.stream is not None
        if not self.lockstep.is_inside:
            self.stream.close_unit(unit)

    def _between(self, model: Any, inputs: Any) -> None:
        self.lockstep.stop_at(-1)

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._end_stream()
        self.experts.close()
        while self._residents:
            self._residents.popitem()[1].drop()
        for name, module in self.structure.embeddings:
            module._parameters["weight"] = self._tables[name]
        self.stage.trim()


def _swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever it hangs; `set_output_embeddings` of some models does more."""
    for module in list(model.modules()):
        for leaf, child in module._modules.items():
            if child is old:
                module._modules[leaf] = new
