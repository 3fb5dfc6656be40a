"""The KV side of the engine: one pool for all turns, from the plan's KV bytes, and what is told about it.

Everything that changes the pool happens in the compute thread, between two passes; only `report` may come from others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from pagein.engines.local.kv import Freed
from pagein.engines.local.writer import Whose
from pagein.engines.writing.kv_options import KvOptions
from pagein.engines.writing.turns import UNKEPT, Turn, Turns
from pagein.errors import ContextTooLong, KvFull, StoreInUse
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.geometry import Geometry
from pagein.kv.tiers.diagnosis import diagnose
from pagein.kv.tiers.pool import KvPool
from pagein.weights.steps.caches import cache_name, cache_of
from pagein.weights.steps.lockstep import Lockstep

SAVE_BOUND = 2.0
"""Seconds that writing KV down may hold up a sleep or an end, as the daemon bounds it for the engines that it saves."""
ASLEEP = 1
"""Bytes that the pool is told to live with while the model sleeps: it has to give back all that it can."""


class Conversations:
    """All conversations of one model."""

    def __init__(
        self, model: Any, geometry: Geometry, pool: KvPool, hub: Lockstep, memory: int, context: int, *, can_park: bool
    ) -> None:
        """``memory``: the pool's bytes on the device while the model is awake."""
        self.pool, self.memory, self.has_encoder = pool, memory, geometry.has_encoder
        self._most = bisect_left(range(context + 1), True, key=lambda tokens: not pool.could_ever(tokens)) - 1
        self.turns = Turns(pool, hub, can_park=can_park)
        self._model = model
        self._name = str(cache_name(model))
        self._few = {"logits_to_keep": 1} if getattr(model, "_supports_logits_to_keep", lambda: False)() else {}
        model.register_forward_pre_hook(self._before_pass, with_kwargs=True)

    @classmethod
    def open(
        cls,
        model: Any,
        geometry: Geometry,
        hub: Lockstep,
        memory: int,
        context: int,
        device: str,
        options: KvOptions,
        folder: str | None,
        cap: int | None,
    ) -> Conversations:
        """Make the pool of a loaded model; raises ModelUnsuited where its KV cannot lie in blocks."""
        pinned = (options.host or 0) if device != "cpu" else None  # only what the daemon knows of
        settings = replace(options.settings, max_tokens=min(options.settings.max_tokens or context, context))

        def make(disk: Path | None) -> KvPool:
            return KvPool(
                model,
                memory=memory,
                device=device,
                host=pinned,
                disk=disk,
                disk_cap=cap or 0,
                settings=settings,
            )

        disk = Path(folder) if folder is not None and cap else None
        try:
            pool = make(disk)
        except (StoreInUse, OSError) as error:  # a cache: the model serves without it
            print(f"conversations are not kept on the disk: {error}", flush=True)
            disk, pool = None, make(None)
        can_park = bool(disk or pinned)
        return cls(model, geometry, pool, hub, memory, context, can_park=can_park)

    # ── one turn ────────────────────────────────────────────────────────────────────────────────

    def check(self, tokens: int) -> None:
        """Raise ContextTooLong, with both numbers, for a text that could not fit if it were the only one."""
        if tokens > self._most:
            raise ContextTooLong(tokens, self._most)

    def begin(self, whose: Whose, tokens: Sequence[int], new: int) -> Turn:
        """Begin a turn; see `Turns.begin`.

        What a decoder keeps depends on its encoder's input: it is not reused, has room from the plan, and is closed.
        """
        if self.has_encoder:
            return Turn(0, self.pool.open(None, UNKEPT, expected=new + 1), whose, None, new + 1)
        return self.turns.begin(whose, tokens, new)

    def end(self, turn: Turn, tokens: Sequence[int]) -> None:
        """End a turn with prompt and answer; see `Turns.end`."""
        if self.has_encoder:
            turn.cache.close()
        else:
            self.turns.end(turn, tokens)

    def abandon(self, turn: Turn) -> None:
        """End a turn that was called off, or failed; see `Turns.abandon`."""
        if self.has_encoder:
            turn.cache.close()
        else:
            self.turns.abandon(turn)

    @contextmanager
    def scratch(self, tokens: Sequence[int]) -> Iterator[Any]:
        """Give a cache for tokens whose every state is wanted, so that none is reused, and free it afterwards."""
        turn = self.turns.begin(Whose(reuse=False), tokens, 0)
        try:
            yield turn.cache
        finally:
            self.turns.abandon(turn)

    def cache_for(self, turn: Turn) -> dict[str, Any]:
        """The argument by which the model takes a turn's cache."""
        return {self._name: turn.cache.with_cross_attention() if self.has_encoder else turn.cache}

    def read_ahead(self, turn: Turn, ids: torch.Tensor, chunk: int) -> None:
        """Compute a prompt [1, n] but for its last chunk: pieces of the size, and so the bits, of transformers' own."""
        start, count = int(turn.cache.get_seq_length()), ids.shape[1]
        while count - start > chunk:
            end = start + chunk
            mask = torch.ones((1, end), dtype=torch.long, device=ids.device)
            part = {"input_ids": ids[:, start:end], "attention_mask": mask, "use_cache": True}
            self._model(**part, **self._few, **{self._name: turn.cache})
            start = end

    def _before_pass(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = cache_of(named)
        if cache is None:
            return
        tokens = named.get("input_ids")
        if tokens is not None:
            self.turns.before_pass(cache, int(tokens.shape[1]))

    # ── all of them ─────────────────────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """The model falls asleep: write down what the bound allows, and give the memory back."""
        self.pool.flush(SAVE_BOUND)
        self.pool.drop_idle()
        self.pool.resize(ASLEEP)

    def wake(self) -> None:
        """It is awake again."""
        self.pool.resize(self.memory)

    @property
    def can_shrink(self) -> bool:
        """Whether memory that the pool does not use goes back: a decoder's behind an encoder has room from the plan."""
        return not self.has_encoder

    def live_with(self, memory: int) -> None:
        """Keep to other bytes, between two passes: what is idle leaves, then turns are parked. Raises KvFull."""
        while True:
            try:
                self.pool.resize(memory)
            except KvFull:
                if not self.turns.park_youngest():
                    raise
            else:
                self.memory = memory
                return

    def close(self) -> None:
        """The worker ends: write down what the bound allows."""
        self.pool.close(SAVE_BOUND)

    def forget(self, gone: Sequence[tuple[str, str]]) -> Freed:
        """Remove conversations from every tier."""
        before = self._disk_bytes()
        return Freed(self.turns.forget(gone), max(before - self._disk_bytes(), 0))

    def thin_out(self, idle: float | None) -> Freed:
        """Remove what was not used for so many seconds, or all."""
        before = self._disk_bytes()
        return Freed(self.pool.thin_out(idle), max(before - self._disk_bytes(), 0))

    def report(self) -> dict[str, object]:
        """The pool's report, JSON-ready."""
        told: dict[str, object] = _plain(self.pool.report())
        return told | diagnose(self.pool.device)

    def _disk_bytes(self) -> int:
        disk = self.pool.report().disk
        return disk.used if disk is not None else 0


def bytes_of_text(geometry: Geometry, tokens: int) -> int:
    """Bytes that one text takes at most on its way to so many tokens."""
    blocks = blocks_of_text(geometry, tokens)
    return sum(count * group.block_bytes for count, group in zip(blocks, geometry.groups, strict=True))


def blocks_of_text(geometry: Geometry, tokens: int) -> list[int]:
    """Blocks of each group that one text takes at most: in a window, for a pass, old ones beside new ones."""
    whole = -(-tokens // BLOCK)
    return [whole if one.window is None else min(whole, 2 * (one.window // BLOCK + 3)) for one in geometry.groups]


def pool_bytes(geometry: Geometry, context: int, texts: int, *, divided: bool) -> int:
    """Bytes of a pool for so many texts of so many tokens, each as it rests and one of them on its way there.

    ``divided``: the groups of layers have shares of their own (off the CPU), each of which must hold that one.
    """
    tokens = context + int(geometry.has_encoder)
    rests, beside = geometry.kv_bytes(tokens), geometry.beside_bytes(tokens)
    if not divided:
        return max(texts * rests, bytes_of_text(geometry, tokens)) + texts * beside
    pairs = zip(blocks_of_text(geometry, tokens), geometry.groups, strict=True)
    whole = rests + beside
    return max(texts * whole, *(-(-whole * most // group.blocks(tokens)) for most, group in pairs))


def _plain(value: Any) -> Any:
    """Values of a report as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
