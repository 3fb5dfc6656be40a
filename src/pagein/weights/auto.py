"""``AutoModel.from_pretrained(path, memory="4GiB")``: an ordinary transformers model that keeps within its bytes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from pagein.catalog.hf_config import read_config
from pagein.errors import BadUsage
from pagein.units import parse_bytes
from pagein.weights.packed.packed_linear import PackedLinear
from pagein.weights.packed.packed_matmul import scratch_bytes
from pagein.weights.packed.variants import open_weights
from pagein.weights.planning.anatomy import dissect
from pagein.weights.planning.demand import Needs
from pagein.weights.planning.needs import CHUNK, activations, cache_bytes
from pagein.weights.reading.checkpoint import Checkpoint
from pagein.weights.reading.disk import DiskSpeed, probe
from pagein.weights.reading.sources import find_sources
from pagein.weights.steps.caches import goes_in_chunks
from pagein.weights.streaming.face import give_face
from pagein.weights.streaming.head import can_be_tiled
from pagein.weights.streaming.placement import Placement, Progress
from pagein.weights.streaming.stage import stage_for
from pagein.weights.streaming.streamed import Streamed
from pagein.weights.streaming.structure import build, with_ties
from pagein.weights.streaming.twins import part

log = logging.getLogger("pagein.weights")

KvNeeds = Callable[[Any, int], tuple[int, int] | None]
"""From a model on meta and its context to the bytes of KV that a token takes, and a text beside; None: as usual."""
CONTEXT = 4096
"""Tokens that the KV cache is planned for where the caller names none and the model allows so many."""


class AutoModel:
    """Loads models within a budget of memory."""

    @staticmethod
    def from_pretrained(
        path: str | Path,
        memory: str | int | None = None,
        *,
        compression: str | None = None,
        shards_path: str | Path | None = None,
        layer_shards_saving_path: str | Path | None = None,
        device: str = "auto",
        prefetch: str | int = "auto",
        dtype: Any = "auto",
        context: int | None = None,
        batch: int = 1,
        chunk: int = CHUNK,
        speed: DiskSpeed | None = None,
        kv_needs: KvNeeds | None = None,
        progress: Progress | None = None,
        verbose: bool = True,
    ) -> Any:
        """Return the transformers model of a folder, streamed from the disk as far as it does not fit ``memory``.

        ``memory`` (bytes, or text like "4GiB"; default: what the machine has free) is for the whole process: libraries,
        weights, buffers, KV cache of ``context`` tokens × ``batch`` sequences, activations of ``chunk`` tokens. On a
        CUDA device it is memory of the device, at most what is free; what the host takes beside is said. The plan is in
        ``model.pagein.plan`` and, if ``verbose``, on standard error before anything is loaded. ``kv_needs`` counts the
        KV cache of who keeps it elsewhere than transformers does. Raises DoesNotFit with the least that would do,
        BadModelFile, ModelUnsuited, BadUsage.
        """
        for name, given in (("context", context), ("batch", batch), ("chunk", chunk)):
            if given is not None and given < 1:
                raise BadUsage(f"{name} is {given}: a plan is for at least 1")
        folder = Path(path)
        budget = parse_bytes(memory) if isinstance(memory, str) else memory
        weights = open_weights(folder, compression, shards_path or layer_shards_saving_path)
        checkpoint = weights.checkpoint
        stage = stage_for(device)
        structure = build(checkpoint, dtype, stage.device, weights.change)
        sources = find_sources(structure.model, checkpoint)
        if part(structure.model, sources):
            structure = with_ties(structure)
        measured = speed or probe(checkpoint.files)
        depth = None if prefetch == "auto" else int(prefetch)
        streamed = Streamed(
            checkpoint,
            structure,
            sources,
            _needs_of(checkpoint, _context(folder, context), batch, chunk, kv_needs),
            budget if budget is not None else stage.free(),
            measured,
            depth,
            stage,
        )
        _tell(streamed, verbose)
        try:
            streamed.load(progress)
        except BaseException:
            streamed.close()
            raise
        model = structure.model
        model.pagein = streamed
        give_face(model, stage.device)
        _settle_generation(model, folder, chunk)
        return model


def _settle_generation(model: Any, folder: Path, chunk: int) -> None:
    """Give the model its folder's settings of generation, and prompts in chunks."""
    if getattr(model, "generation_config", None) is None:
        return
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    if goes_in_chunks(model):
        model.generation_config.prefill_chunk_size = chunk


def _tell(streamed: Streamed, verbose: bool) -> None:
    name = streamed.checkpoint.folder.name
    for line in [*streamed.plan.lines(), *streamed.notes]:
        log.info("%s: %s", name, line)
        if verbose:
            print(f"{name}: {line}", file=sys.stderr)


def _context(folder: Path, context: int | None) -> int:
    longest = read_config(folder).context_train
    if context is not None:
        return context
    return min(longest or CONTEXT, CONTEXT)


def _needs_of(
    checkpoint: Checkpoint, context: int, batch: int, chunk: int, kv_needs: KvNeeds | None
) -> Callable[[Placement], Needs]:
    """Return how a placed model's needs are counted: parts as built, cache and activations from the config."""

    def needs(placement: Placement) -> Needs:
        structure, parts = placement.structure, dissect(checkpoint)
        at_once = chunk if goes_in_chunks(structure.model) else context
        counted = kv_needs(structure.model, context) if kv_needs is not None else None
        per_token, fixed = counted or cache_bytes(checkpoint, parts, context)
        return Needs(
            runtime=placement.stage.runtime(),
            resident_small=placement.small.nbytes,
            embedding=sum(table.numel() * table.element_size() for table in placement.tables.values()),
            head=placement.head.nbytes if placement.head is not None else 0,
            tied=structure.tied,
            units=placement.units,
            kv_per_token=per_token,
            context=context,
            batch=batch,
            activations=activations(checkpoint, parts, batch, context, at_once) + _scratch(placement),
            streams_head=structure.head is not None and can_be_tiled(structure.head[1]),
            head_rows=structure.head[1].out_features if structure.head else 0,
            kv_fixed=fixed,
            experts=placement.experts.needs,
        )

    return needs


def _scratch(placement: Placement) -> int:
    """Bytes in which packed weights are dequantised for prompts; on a device of its own they are in the runtime."""
    packed = [one.in_features for one in placement.structure.model.modules() if isinstance(one, PackedLinear)]
    return scratch_bytes(max(packed)) if packed and placement.stage.alignment is None else 0
