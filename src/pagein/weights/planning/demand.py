"""What a model takes whole, part by part: the input of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagein.units import format_bytes

_LEAST_CONTEXT = 16


@dataclass(frozen=True, slots=True)
class Unit:
    """One repeated block: what a pass reads of it, and the bytes of the buffer that it fills."""

    name: str
    nbytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, which are read one by one into a cache of their own and are in no `Unit`; all in bytes."""

    total: int
    per_token: int
    """Read for one token when nothing is cached: the active experts of every block."""
    least: int
    """The cache without which no block could compute: the active experts of one block."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes whole; in bytes where no other unit is given."""

    runtime: int
    """The process before any weight: interpreter, libraries, threads."""
    resident_small: int
    """What always stays: norms, biases, rotary tables, everything outside blocks, embedding and head."""
    embedding: int
    head: int
    """0 where there is none. Where `tied`, head and embedding are one tensor of this size."""
    tied: bool
    units: tuple[Unit, ...]
    kv_per_token: int
    context: int
    """Tokens of one sequence."""
    batch: int
    """Sequences at once."""
    activations: int
    streams_head: bool = True
    """Whether the head may be `HeadPlace.TILED`; where not, it must fit."""
    head_rows: int = 0
    """Rows of the head, for the rows of a tile; 0 where unknown."""
    kv_fixed: int = 0
    """Cache of one sequence that does not grow with the context: sliding windows, recurrent state."""
    experts: Experts | None = None

    def for_batch(self, batch: int) -> Needs:
        """The same for another number of sequences at once."""
        return replace(self, batch=batch, activations=self.activations * batch // self.batch)

    @property
    def kv(self) -> int:
        """Bytes of the cache of all sequences at their longest."""
        return self.batch * (self.context * self.kv_per_token + self.kv_fixed)

    @property
    def fixed(self) -> int:
        """Bytes that no choice of the plan changes."""
        return self.runtime + self.resident_small + self.activations + self.kv

    @property
    def whole(self) -> int:
        """Bytes of a full load."""
        weights = self.head + (0 if self.tied else self.embedding) + sum(unit.slot_bytes for unit in self.units)
        return self.fixed + weights + (self.experts.total if self.experts else 0)


def touched_bytes(needs: Needs) -> int:
    """Return the bytes of weights that a token computes with, wherever they come from."""
    experts = needs.experts.per_token if needs.experts else 0
    return sum(unit.nbytes for unit in needs.units) + needs.head + needs.resident_small + experts


def way_out(needs: Needs, missing: int) -> str:
    """Say what would have to shrink by so many bytes: the context where that will do, the batch, or the weights."""
    more = format_bytes(missing)
    per_token = needs.batch * needs.kv_per_token
    if per_token:
        context = needs.context - -(-missing // per_token)
        if context >= _LEAST_CONTEXT:
            return f"a context of {context} tokens instead of {needs.context} would fit, or give {more} more"
    each = needs.context * needs.kv_per_token + needs.kv_fixed
    if each and needs.batch - -(-missing // each) >= 1:
        batch = needs.batch - -(-missing // each)
        return f"{batch} sequences at once instead of {needs.batch} would fit, or give {more} more"
    return f"give {more} more, or store the weights in fewer bits: buffers shrink with the blocks"
