"""A keeper on a real store, over the slots of an engine that a test controls."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from secrets import token_hex
from typing import Any

from pagein.catalog.model import Format, ModelEntry, ModelInfo, Need, NeedSource
from pagein.config.schema import Settings
from pagein.daemon import keeper as module
from pagein.daemon.keeper import Keeper
from pagein.errors import PageinError, SlotLost
from pagein.gateway.ports import Prepared
from pagein.history import TurnOf
from pagein.kv.snapshots.llama_file import read_slot_file
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import Capability, Endpoint, Ready, StateFacts
from pagein.sessions.llama_slots import WAY, RestoredSlot, SavedSlot, Slot
from tests.sessions.test_llama_slots import slot_bytes

COMPLETION = "/v1/completions"
TOKEN_BYTES = 8 * 1024
"""As a small model has, so that measured speeds are those of real files."""
BOUND = 20.0
"""Seconds after which a wait in vain ends a test: a bound, not a pace."""
TALK = "The lighthouse keeper wrote down every ship that passed. "
OTHER = "Name three colours that no lighthouse ever had, and why! "


class Engine:
    """Stands for `LlamaSlots` and the server behind it: a token per character, cells as the server keeps them."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder, self.cells = folder, {slot: [] for slot in range(slots)}  # type: dict[int, list[int]]
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, PageinError] = {}
        """What each call raises."""
        self.gates: dict[str, asyncio.Event] = {}
        """What each call waits for, first of all."""
        self.busy: set[int] = set()
        self.closed = False

    async def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.gates:
            await self.gates[call].wait()
        if call in self.faults:
            raise self.faults[call]

    def new_file(self) -> Path:
        return self.folder / f"{token_hex(8)}.kv"

    async def look(self, timeout: float = 1.0) -> list[Slot]:
        await self._enter("look")
        return [Slot(slot, slot in self.busy, len(cells), None) for slot, cells in self.cells.items()]

    async def tokens_of(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> list[int] | None:
        await self._enter("tokens_of")
        return [ord(letter) for letter in body["prompt"]] if isinstance(body.get("prompt"), str) else None

    async def save(self, slot: int, timeout: float) -> SavedSlot | None:
        await self._enter("save")
        if self.closed:
            raise SlotLost("the worker is gone")
        if not self.cells[slot]:
            return None
        file = self.new_file()
        file.write_bytes(slot_bytes(*self.cells[slot]) + bytes(TOKEN_BYTES * len(self.cells[slot])))
        return SavedSlot(file, tuple(self.cells[slot]), file.stat().st_size, 0.001, 4)

    async def restore(self, slot: int, path: Path, tokens: Any, timeout: float) -> RestoredSlot:
        self.cells[slot] = []
        await self._enter("restore")
        self.cells[slot] = list(read_slot_file(path).tokens)
        return RestoredSlot(len(tokens), 1, 0.001)

    async def erase(self, slot: int, timeout: float = 1.0) -> None:
        await self._enter("erase")
        self.cells[slot] = []

    async def close(self) -> None:
        self.closed = True

    def answers(self, prompt: str, slot: int, said: str) -> Counted:
        """Compute what a slot lacks of a prompt, and generate."""
        tokens, there = [ord(letter) for letter in prompt], self.cells[slot]
        same = next((n for n, (a, b) in enumerate(zip(tokens, there, strict=False)) if a != b), len(there))
        cached = min(same, len(tokens) - 1)
        self.cells[slot] = tokens + [ord(letter) for letter in said][:-1]  # the last has no KV yet
        return Counted(cached, len(tokens) - cached)


class Clockless:
    """asyncio whose sleeps end when the test says so: all of them, or one by one."""

    def __init__(self) -> None:
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.sleepers: list[asyncio.Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.sleepers.append(mine := asyncio.Event())
        waits = [asyncio.ensure_future(event.wait()) for event in (self.quiet, mine)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def faults_in(caplog: Any) -> list[str]:
    """What failed unseen, in a task or at a worker's end."""
    return [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


class World:
    """One keeper, one model and its worker."""

    def __init__(self, folder: Path, monkeypatch: Any, **settings: Any) -> None:
        self.folder, self.clock = folder, Clockless()
        self.weights = folder / "weights.gguf"
        self.weights.parent.mkdir(parents=True, exist_ok=True)
        self.weights.write_bytes(b"weights")
        monkeypatch.setattr(module, "asyncio", self.clock)
        monkeypatch.setattr(module, "LlamaSlots", lambda name, endpoint, facts: self.engine)
        self.attention, self.slots, self.kv_type, self.build, self.workers = "full", 1, "f16", "b1", 0
        self.keeper = self.opened(**settings)

    def opened(self, **settings: Any) -> Keeper:
        """Open a keeper on the folder, as a daemon does at its start."""
        cap = {"state": {"disk": 100_000_000}}
        given = Settings.model_validate({"state_dir": str(self.folder), "models": {}, **(settings or cap)})
        keeper = Keeper.open(self.folder / "kv", given)
        assert keeper is not None
        keeper.store._room.floor = 0  # whatever the machine of the test has free
        return keeper

    @property
    def entry(self) -> ModelEntry:
        info = ModelInfo(self.weights, Format.GGUF, (self.weights,), 7, 7, metadata={"attention": self.attention})
        need = Need({"ram": 1}, NeedSource.DECLARED, "declared")
        does = frozenset({Capability.CHAT, Capability.COMPLETION})
        return ModelEntry("m", "llama_cpp", "1", does, info, "cpu", need, need, "key")

    async def begin(self) -> Engine:
        """A worker of the model is ready, and its weights are known."""
        self.workers += 1
        folder = self.keeper.slots / f"w{self.workers}"
        folder.mkdir(mode=0o700)
        self.engine = Engine(folder, self.slots)
        facts = StateFacts(WAY, str(folder), self.slots, self.build, 4096, self.kv_type, self.kv_type)
        self.keeper.begin(self.entry, Ready("t", Endpoint(socket="/s"), [Capability.CHAT], "1", 4096, state=facts))
        await self.settle()
        return self.engine

    async def prepare(self, prompt: object, whose: TurnOf | None = None, **fields: object) -> Prepared:
        """What the gateway asks before a request."""
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        async with asyncio.timeout(BOUND):
            return await self.keeper.prepare("m", COMPLETION, body, whose)

    async def turn(self, prompt: str, said: str = "", whose: TurnOf | None = None) -> Prepared:
        """One whole request, and what is done after it."""
        prepared = await self.prepare(prompt, whose)
        self.engine.busy.clear()
        self.keeper.account("m", prepared, self.engine.answers(prompt, prepared.slot or 0, said))
        await self.settle()
        return prepared

    async def evict(self) -> None:
        """The worker leaves by the scheduler's wish; another begins."""
        async with asyncio.timeout(BOUND):
            await self.keeper.end("m")
        await self.settle()
        await self.begin()

    async def settle(self) -> None:
        """Let everything end that does not wait for the test."""
        async with asyncio.timeout(BOUND):
            while self.clock.quiet.is_set() and self.keeper._tasks and not self.engine_waits():
                await asyncio.wait(list(self.keeper._tasks), timeout=0.01)
        for _ in range(20):
            await asyncio.sleep(0)

    def engine_waits(self) -> bool:
        """Whether the engine hangs in a call."""
        return any(not gate.is_set() and self.engine.calls[call] for call, gate in self.engine.gates.items())

    async def until(self, call: str, times: int = 1) -> None:
        """Wait until the engine was asked for something."""
        async with asyncio.timeout(BOUND):
            while self.engine.calls[call] < times:
                await asyncio.sleep(0.001)

    @property
    def misses(self) -> dict[str, int]:
        counters = self.keeper.counters.get("m")
        return dict(counters.misses) if counters is not None else {}

    async def close(self) -> None:
        """End the keeper, and see that nothing is left of it."""
        self.clock.quiet.set()
        for gate in self.engine.gates.values() if self.workers else ():
            gate.set()
        async with asyncio.timeout(BOUND):
            await self.keeper.end("m")
            await self.keeper.close()
        for _ in range(5):
            await asyncio.sleep(0)
        kv = self.folder / "kv"
        left = [path for name in ("incoming", "slots") for path in (kv / name).iterdir()]
        assert not left, left
        assert not self.keeper._tasks
        assert asyncio.all_tasks() == {asyncio.current_task()}
