"""The transformers engine: safetensors models, whole where they fit their allowance and streamed where they do not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
import transformers
from aiohttp import web

from pagein.catalog.hf_config import read_config, sees_whole_texts
from pagein.engines.contract import Engine, Started
from pagein.engines.local.allowance import add_allowance_route
from pagein.engines.local.door import Door
from pagein.engines.local.kv import add_kv_route
from pagein.engines.local.memory import give_back_freed_blocks, give_back_now
from pagein.engines.local.sleep import Bed
from pagein.engines.local.threads import compute_threads
from pagein.engines.local.write import Desk
from pagein.engines.options import read_options
from pagein.engines.torch_device import Bound, device_of, pool_of
from pagein.engines.writing.conversations import SAVE_BOUND, Conversations, pool_bytes
from pagein.engines.writing.hub import Hub
from pagein.engines.writing.kv_desk import KvDesk
from pagein.engines.writing.kv_options import read_kv
from pagein.engines.writing.tokens import Tokens
from pagein.engines.writing.vectors import Body, pooling_of
from pagein.engines.writing.writer import TransformersWriter
from pagein.errors import DoesNotFit, LoadFailed, ModelUnsuited, PageinError
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.reading import read_geometry
from pagein.protocol import BLOCKS_WAY, StateFacts, WorkerSpec
from pagein.units import format_bytes
from pagein.weights.auto import CONTEXT, AutoModel
from pagein.weights.planning.needs import CHUNK

SPARE = 24 * 1024**2
SPARE_SHARE = 50
"""Bytes of the allowance that no plan is given, a fiftieth and at least so many: what requests in flight and the HTTP
server take beside the model."""


@dataclass(frozen=True, slots=True)
class TransformersOptions:
    """Options of the engine."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What it computes in; ``auto`` = as stored."""
    compression: Literal["8bit", "4bit"] | None = None
    """Weights in fewer bits, from shards that are made once."""
    shards: str | None = None
    """Folder of those shards."""
    prefetch: int | None = None
    """Buffers that blocks are read into ahead of time (2 to 4)."""
    pooling: Literal["mean", "cls", "last"] | None = None
    """How hidden states become the vector of a text; by default as the folder says, else their mean."""
    kv: dict | None = None  # type: ignore[type-arg]
    """KV tiers, as `pagein tune kv` prints them: `memory` (most on the device; never more than `context` × `parallel`
    tokens), `host` (bytes of pinned memory behind a GPU, none unless set), `active`, `warm`, `device_share`,
    `host_share`, `slack`, `pinned_share`, `max_tokens`, `write_behind`, `compression`, `overlap`, `worth`."""


class Transformers(Engine):
    """One model of a safetensors folder behind a local HTTP server."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._options = read_options(TransformersOptions, spec.options, spec.name)
        self._door: Door | None = None
        self._hub: Hub | None = None
        self._model: Any = None
        self._bed: Bed | None = None
        self._bound: Bound | None = None
        self._allowance = spec.allowance.get(self.pool)
        self._kv = read_kv(self._options.kv, spec.parallel, spec.name)
        self._conversations: Conversations | None = None
        self._geometry: Geometry | None = None
        self._context = 0
        self._desk: Desk | None = None

    @property
    def pool(self) -> str:
        """The pool that its allowance is in: that of the device it computes on."""
        return pool_of(self.spec)

    @classmethod
    def version(cls) -> str:
        """Versions of transformers and of torch, which computes."""
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def start(self) -> Started:
        """Load the model within its allowance and answer HTTP."""
        folder, device = self._folder(), device_of(self.spec)
        give_back_freed_blocks()
        torch.set_num_threads(compute_threads(self.spec))
        transformers.logging.set_verbosity_error()
        tokens = Tokens.of_folder(self.spec.name, folder)
        context, chunk = self._lengths(folder)
        self._model = self._load(folder, device, context, chunk)
        give_back_now()
        self._bound = Bound(device)
        self._bound.set(self._allowance, self._model.pagein.plan)
        hub = self._hub = Hub(self._model.pagein.lockstep, self._break)
        bed = self._bed = Bed(self.spec.name, self, hub)
        kept = self._conversations = self._open_pool(str(self._model.device), context)
        body = Body(self._model, self._options.pooling or pooling_of(folder), chunk, kept)
        writer = TransformersWriter(self.spec.name, self._model, tokens, hub, bed, body, context, kept)
        desk = self._desk = Desk(self.spec.name, writer, self.spec.parallel)

        def add_routes(router: web.UrlDispatcher) -> None:
            desk.add_routes(router)
            bed.add_routes(router)
            add_allowance_route(router, self)
            if kept is not None:
                add_kv_route(router, KvDesk(kept, hub))

        self._door = Door(self.spec, add_routes)
        hub.start()
        state = self._state_facts(context) if kept is not None else None
        return Started(self._door.open(), list(writer.capabilities), context, sleeps=True, state=state)

    def _open_pool(self, device: str, context: int) -> Conversations | None:
        """Make the pool from the plan's KV bytes; None for a model whose KV is of its own kind, or that has none."""
        model, geometry = self._model, self._geometry
        if geometry is None:
            return None
        self._context = context
        memory = self._pool_bytes(geometry, self.spec.parallel)
        hub, disk = model.pagein.lockstep, (self.spec.kv_dir, self.spec.kv_disk)
        return Conversations.open(model, geometry, hub, memory, context, device, self._kv, *disk)

    def _pool_bytes(self, geometry: Geometry, texts: int) -> int:
        memory = pool_bytes(geometry, self._context, texts, divided=self.spec.device != "cpu")
        return memory if self._kv.memory is None else min(memory, self._kv.memory)

    def _kv_needs(self, model: Any, context: int) -> tuple[int, int] | None:
        """Bytes of KV per token, and of a text beside: what the pool takes for it in whole blocks."""
        if not model.can_generate():
            return None
        try:
            geometry = self._geometry = read_geometry(model)
        except ModelUnsuited as error:
            print(f"conversations are not kept: {error.message}", flush=True)
            return None
        if geometry.has_encoder:
            return None
        per_token, parallel = geometry.bytes_per_token, self.spec.parallel
        whole = pool_bytes(geometry, context, parallel, divided=self.spec.device != "cpu")
        return per_token, -(-whole // parallel) - context * per_token

    def _state_facts(self, context: int) -> StateFacts:
        dtype, slots = str(self._model.dtype).removeprefix("torch."), self.spec.parallel
        return StateFacts(BLOCKS_WAY, self.spec.kv_dir or "", slots, self.version(), context, dtype, dtype)

    def sleep(self) -> None:
        """Give all weights and buffers back, and KV as far as it is not on the disk yet; the model object stays."""
        if self._conversations is not None:
            self._conversations.rest()
        self._model.pagein.rest()

    def wake(self) -> None:
        """Read them again; raises LoadFailed, with nothing in memory, where that fails."""
        try:
            self._model.pagein.load()
        except (PageinError, OSError, torch.OutOfMemoryError) as error:
            self._model.pagein.rest()
            raise LoadFailed(f"{self.spec.path} cannot be loaded again: {error}") from error
        if self._conversations is not None:
            self._conversations.wake()

    async def set_allowance(self, count: int) -> dict[str, object]:
        """Plan anew for other bytes, between two passes."""
        assert self._hub is not None
        try:
            plan = await self._hub.between(lambda: self._plan_anew(count))
        except DoesNotFit as error:
            raise _with_spare(error, count) from error
        lines = [*plan.lines(), *self._model.pagein.notes]
        print(f"allowance is now {format_bytes(count)} of {self.pool}: {'; '.join(lines)}", flush=True)
        return {
            "total": plan.total,
            "resident": len(plan.resident),
            "blocks": len(plan.needs.units),
            "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
            "plan": lines,
        }

    def _plan_anew(self, count: int) -> Any:
        assert self._bed is not None
        assert self._bound is not None
        self._bed.check()
        streamed, before = self._model.pagein, self._model.pagein.plan.memory
        self._bound.lift()
        try:
            self._live_with(usable(count))
            self._allowance = count
        except torch.OutOfMemoryError as error:  # others took memory of the device since the plan was made
            self._return_to(before)
            what = f"{self.spec.device} could not give {format_bytes(count)}"
            raise LoadFailed(f"{what}: {_first_line(error)}") from error
        finally:
            self._bound.set(self._allowance, streamed.plan)
        give_back_now()
        return streamed.plan

    def _live_with(self, memory: int) -> None:
        """Plan for so many bytes; where they are too few for the KV of all texts at once, for fewer of them."""
        streamed, kept, geometry = self._model.pagein, self._conversations, self._geometry
        if kept is None or geometry is None or not kept.can_shrink:
            streamed.set_memory(memory)
            return
        texts, beside = self._texts_within(memory, geometry)
        if texts < streamed.plan.needs.batch:
            kept.live_with(self._pool_bytes(geometry, texts))
        streamed.set_memory(memory - beside, texts)
        kept.live_with(self._pool_bytes(geometry, texts))

    def _texts_within(self, memory: int, geometry: Geometry) -> tuple[int, int]:
        """How many texts at once there is KV for, as many as possible, and what the pool takes beyond the plan's KV.

        Raises DoesNotFit where not even one fits.
        """
        streamed = self._model.pagein
        for texts in range(self.spec.parallel, 0, -1):
            beside = max(self._pool_bytes(geometry, texts) - streamed.plan.needs.for_batch(texts).kv, 0)
            try:
                streamed.check_memory(memory - beside, texts)
            except DoesNotFit:
                if texts == 1:
                    raise
            else:
                return texts, beside
        raise AssertionError("one text, or its refusal")

    def _return_to(self, memory: int) -> None:
        """Take the former plan again; a worker that cannot even do that is of no use any more."""
        try:
            self._model.pagein.set_memory(memory)
        except Exception as error:
            why = f"it cannot have {format_bytes(memory)} of {self.pool} again: {_first_line(error)}"
            Thread(target=self._break, args=(why,), daemon=True).start()  # which waits for what computes here
            raise

    def wait(self) -> str:
        """Block until the HTTP server ends."""
        assert self._door is not None, "wait() before start()"
        return self._door.wait()

    def stop(self) -> None:
        """Close the HTTP server and end the compute thread."""
        if self._door is not None:
            self._door.close()
        if self._hub is not None and self._conversations is None:
            self._hub.stop()
        elif self._hub is not None and self._conversations is not None:
            self._hub.stop(self._conversations.close, SAVE_BOUND * 2)

    def _break(self, why: str) -> None:
        """The compute thread cannot go on: so neither can the worker."""
        assert self._door is not None
        self._door.close(why)

    def _folder(self) -> Path:
        folder = Path(self.spec.path or "")
        if self.spec.path is None or not (folder / "config.json").is_file():
            raise LoadFailed(f"model {self.spec.name!r} is no folder with a config.json: {self.spec.path}")
        return folder

    def _lengths(self, folder: Path) -> tuple[int, int]:
        """Tokens of context, and of a chunk: the whole context where a model must see all of a text at once."""
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        longest = read_config(folder).context_train
        context = self.spec.context or min(longest or CONTEXT, CONTEXT)
        at_once = sees_whole_texts(config.architectures or (), config.is_encoder_decoder)
        return context, context if at_once else min(CHUNK, context)

    def _load(self, folder: Path, device: str, context: int, chunk: int) -> Any:
        options, allowance = self._options, self._allowance
        try:
            return AutoModel.from_pretrained(
                folder,
                memory=None if allowance is None else usable(allowance),
                compression=options.compression,
                shards_path=options.shards,
                device=device,
                prefetch="auto" if options.prefetch is None else options.prefetch,
                dtype=options.dtype,
                context=context,
                batch=self.spec.parallel,
                chunk=chunk,
                kv_needs=self._kv_needs,
            )
        except PageinError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise LoadFailed(f"transformers cannot load {folder}: {reason}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def _with_spare(error: DoesNotFit, count: int) -> DoesNotFit:
    """The refusal in bytes of the whole allowance; one of other memory (the host's, a device's free bytes) as it is."""
    if error.details["memory_bytes"] != usable(count):
        return error
    need = int(str(error.details["need_bytes"])) + max(SPARE, count // SPARE_SHARE)
    parts = error.details["parts"]
    assert isinstance(parts, dict)
    return DoesNotFit(need, count, {**parts, "spare": max(SPARE, count // SPARE_SHARE)}, error.hint or "")


def usable(allowance: int) -> int:
    """What a plan is given of an allowance of bytes."""
    return max(allowance - max(SPARE, allowance // SPARE_SHARE), 1)
