"""From a configured model to everything that the daemon needs to know before it starts it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagein.catalog.device import Choice, choose_device
from pagein.catalog.engines import (
    BUILT_IN_SERVER,
    BY_FORMAT,
    ENGINES,
    EngineRow,
    find_llama_server,
    find_row,
    installed_version,
    known_engines,
    program_version,
    repacked_types,
)
from pagein.catalog.estimate import estimate
from pagein.catalog.estimate_parts import least as least_parts
from pagein.catalog.estimate_transformers import least
from pagein.catalog.gguf_geometry import WITHOUT_CACHE
from pagein.catalog.gpu_build import computes_on_gpu
from pagein.catalog.identity import digest
from pagein.catalog.inspect import inspect
from pagein.catalog.model import Format, ModelEntry, ModelInfo, Need, NeedSource
from pagein.catalog.observed import Observed, PeakStore
from pagein.catalog.option_names import unknown_option
from pagein.catalog.recipes import RECIPE_CAPABILITIES, guess_recipe
from pagein.config.schema import Model
from pagein.errors import BadModelFile
from pagein.memory.snapshot import MachineSnapshot
from pagein.protocol import Capability
from pagein.units import format_bytes

LEAST_HEADROOM = 8 * 1024**2
HEADROOM_SHARE = 20
"""A measured peak is raised by its twentieth, at least 8 MiB: pages shared with a neighbour count in full once that
neighbour has left (5 to 15 MiB of libraries between two workers of this project)."""
DEFAULT_CONTEXT = 4096
"""Tokens where the configuration names none: long enough for a chat, and no trained maximum of 128k by accident."""
DEFAULT_VECTOR_CONTEXT = 512
"""The same for decoders that serve vectors: llama.cpp computes such a text at once, its whole vocabulary per token."""
_WRITERS = ("CausalLM", "ConditionalGeneration", "LMHeadModel")
"""Parts of the names of model classes that write text; all others make vectors."""
_KEEPS_WITHIN = ("transformers", "parts")
"""Engines that keep within what they are given, so that what they were measured to take is not what they need."""
_NOT_SERVED = {"mmproj": "a vision projector", "adapter": "an adapter", "imatrix": "an importance matrix"}
"""Values of ``general.type`` in GGUF files that are no models."""


def resolve(name: str, config: Model, machine: MachineSnapshot, peaks: PeakStore) -> ModelEntry:
    """Resolve one model. Blocks for reads of headers and, once per file, of samples of the weights.

    Never raises for a bad model: its entry says the `problem`.
    """
    if config.model is None:
        return _entry(name, config, None, config.engine or "command", machine, peaks)
    try:
        info = inspect(config.model)
        return _entry(name, config, info, config.engine or BY_FORMAT[info.format], machine, peaks)
    except BadModelFile as error:
        text = f"{error.message}; {error.hint}" if error.hint else error.message
        return _unreadable(name, config, text)


def with_headroom(used: Mapping[str, int]) -> dict[str, int]:
    """Return what to reserve for a measured peak."""
    return {pool: size + max(LEAST_HEADROOM, size // HEADROOM_SHARE) for pool, size in used.items()}


def describe_peak(used: Mapping[str, int]) -> str:
    """Return a measured peak in words, with the head-room that `with_headroom` adds."""
    return f"{_listed(used)}, + 5 % and at least {format_bytes(LEAST_HEADROOM)}"


def _listed(used: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} {pool}" for pool, size in sorted(used.items()))


@dataclass(frozen=True, slots=True)
class _Settings:
    """What decides the memory of one model, resolved."""

    engine: str
    version: str
    context: int | None
    parallel: int
    options: Mapping[str, object]
    recipe: str | None
    program: Path | None
    """The llama-server that will compute, or None."""


def _entry(
    name: str, config: Model, info: ModelInfo | None, engine: str, machine: MachineSnapshot, peaks: PeakStore
) -> ModelEntry:
    row = find_row(engine)
    settings = _settings(config, info, engine, row)
    choice = _device(config, info, settings, row, machine)
    estimated = _pooled(_estimate(info, settings, choice.device), machine)
    declared = _declared(config, choice.device, estimated, machine)
    key = peak_key(config, info, settings, choice.device, peaks)
    fewest = _least(info, settings, choice.device)
    seen = None if settings.engine in _KEEPS_WITHIN else peaks.peak(key)
    return ModelEntry(
        name=name,
        engine=engine,
        engine_version=settings.version,
        capabilities=_capabilities(config, info, settings, row),
        info=info,
        device=choice.device,
        estimate=declared,
        need=declared if seen is None else _measured(seen, declared),
        peak_key=key,
        context=settings.context,
        recipe=settings.recipe,
        options=settings.options,
        split=info.split if info is not None and settings.engine == "parts" else None,
        least=fewest,
        problem=_problem(info, settings, row) or choice.problem or _one_memory(settings, choice, machine),
    )


def _unreadable(name: str, config: Model, problem: str) -> ModelEntry:
    declared = {"ram": config.memory} if config.memory is not None else {}
    source = NeedSource.DECLARED if declared else NeedSource.ESTIMATED
    need = Need(declared, source, "unknown: the model cannot be read")
    return ModelEntry(
        name=name,
        engine=config.engine or "unknown",
        engine_version="unknown",
        capabilities=frozenset(),
        info=None,
        device="cpu",
        estimate=need,
        need=need,
        peak_key="",
        context=config.context,
        recipe=config.recipe,
        options=config.options,
        problem=problem,
    )


def _settings(config: Model, info: ModelInfo | None, engine: str, row: EngineRow | None) -> _Settings:
    options = _options(config, info, engine)
    program = find_llama_server(options) if engine == "llama_cpp" else None
    version = None
    if program is not None:
        version = program_version(program)
    elif row is not None:
        version = installed_version(row)
    recipe = config.recipe
    if recipe is None and engine == "onnx" and info is not None:
        recipe = guess_recipe(info)
    return _Settings(
        engine=engine,
        version=version or "not installed",
        context=_context(config, info, engine, options),
        parallel=config.parallel_for(engine),
        options=options,
        recipe=recipe,
        program=program,
    )


def _options(config: Model, info: ModelInfo | None, engine: str) -> dict[str, object]:
    """The configured options; for llama.cpp with what an embedding or reranking model says about itself."""
    options: dict[str, object] = dict(config.options)
    if engine != "llama_cpp" or info is None or "embedding" in options or "rerank" in options:
        return options
    if info.pooling == "rank":
        options["rerank"] = True
    elif info.pooling is not None or info.architecture in WITHOUT_CACHE:
        options["embedding"] = True
    return options


def _context(config: Model, info: ModelInfo | None, engine: str, options: Mapping[str, object]) -> int | None:
    if config.context is not None or info is None or engine not in ("llama_cpp", *_KEEPS_WITHIN):
        return config.context
    if engine in _KEEPS_WITHIN:
        return min(DEFAULT_CONTEXT, info.context_train or DEFAULT_CONTEXT)
    vectors = options.get("embedding") is True or options.get("rerank") is True
    usual = DEFAULT_VECTOR_CONTEXT if vectors and info.architecture not in WITHOUT_CACHE else DEFAULT_CONTEXT
    return min(usual, info.context_train or usual)


def _device(
    config: Model, info: ModelInfo | None, settings: _Settings, row: EngineRow | None, machine: MachineSnapshot
) -> Choice:
    if row is None:
        return Choice("cpu")
    return choose_device(
        config.device,
        settings.engine,
        machine,
        may_choose_gpu=row.gpu,
        can_use_gpu=lambda: computes_on_gpu(row, settings.options),
        need_on=lambda device: _estimate(info, settings, device),
    )


def _estimate(info: ModelInfo | None, settings: _Settings, device: str) -> Need:
    return estimate(
        info,
        settings.engine,
        context=settings.context,
        parallel=settings.parallel,
        device=device,
        options=settings.options,
        recipe=settings.recipe,
        program=settings.program is not None,
        repacked=repacked_types(settings.program is not None),
    )


def _least(info: ModelInfo | None, settings: _Settings, device: str) -> int | None:
    """What the model can do with where its engine brings in the rest as it is needed."""
    if info is None or settings.engine not in _KEEPS_WITHIN:
        return None
    if settings.engine == "transformers":
        return least(info, settings.context, settings.parallel, settings.options, device)
    if info.split is None:
        return None
    return least_parts(info, settings.context, settings.parallel, settings.options, device)


def _pooled(need: Need, machine: MachineSnapshot) -> Need:
    """On a machine with one memory, what a GPU takes is taken from ``ram``."""
    if not machine.unified:
        return need
    return Need({"ram": sum(need.bytes.values())}, need.source, need.explanation)


def _declared(config: Model, device: str, estimated: Need, machine: MachineSnapshot) -> Need:
    """The declared figure in the pool of the device, in place of the estimate's."""
    if config.memory is None:
        return estimated
    pool = "ram" if device == "cpu" or machine.unified else device
    rest = {name: size for name, size in estimated.bytes.items() if name != pool} if pool != "ram" else {}
    return Need({**rest, pool: config.memory}, NeedSource.DECLARED, f"declared {format_bytes(config.memory)}")


def _measured(seen: Observed, before: Need) -> Need:
    """What was measured, with head-room; pools that were not measured, and a load alone, keep what was said before.

    A load that took no more than was said proves nothing: what was said stays a guess, which the first use corrects.
    """
    raised = with_headroom(seen.used)
    if not seen.in_use:
        raised = {pool: max(size, before.bytes.get(pool, 0)) for pool, size in raised.items()}
        if {**before.bytes, **raised} == before.bytes:
            return Need(before.bytes, before.source, f"{before.explanation}; a load alone took {_listed(seen.used)}")
    times = "once" if seen.samples == 1 else f"{seen.samples} times"
    return Need(
        {**before.bytes, **raised},
        NeedSource.MEASURED,
        f"highest of what was measured {times}: {describe_peak(seen.used)}",
    )


def peak_key(config: Model, info: ModelInfo | None, settings: _Settings, device: str, peaks: PeakStore) -> str:
    """The key of remembered peaks: identity of the weights, engine, version, and every setting that changes memory.

    Raises BadModelFile when the weights cannot be read.
    """
    threads = config.threads if config.threads is not None else (len(config.cpus) if config.cpus else None)
    parts = {
        "weights": digest(info.files, peaks) if info is not None else _command_identity(config.command or []),
        "engine": settings.engine,
        "version": settings.version,
        "context": settings.context,
        "parallel": settings.parallel,
        "threads": threads,
        "device": device,
        "options": settings.options,
        "recipe": settings.recipe,
        "env": config.env,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _command_identity(command: list[str]) -> list[str]:
    """A command line, with size and time of the program that it runs."""
    found = shutil.which(command[0]) if command else None
    try:
        return [*command, program_version(Path(found).resolve())] if found else command
    except OSError:
        return command


def _capabilities(
    config: Model, info: ModelInfo | None, settings: _Settings, row: EngineRow | None
) -> frozenset[Capability]:
    if config.capabilities is not None:
        return frozenset(Capability(word) for word in config.capabilities)
    if settings.engine == "onnx":
        told = RECIPE_CAPABILITIES.get(settings.recipe or "")
        return frozenset({told}) if told is not None else frozenset()
    if settings.engine == "llama_cpp" and info is not None:
        if settings.options.get("rerank") is True:
            return frozenset({Capability.RERANK})
        if settings.options.get("embedding") is True:
            return frozenset({Capability.EMBEDDING})
        if not info.has_chat_template and settings.options.get("chat_template") is None:
            return frozenset({Capability.COMPLETION})
    if settings.engine == "transformers" and info is not None:
        return _written(info)
    if settings.engine == "parts" and info is not None and info.split is not None:
        return info.split.capabilities
    return row.capabilities if row is not None else frozenset()


def _written(info: ModelInfo) -> frozenset[Capability]:
    """What a model class can do; the worker says it again from the loaded model."""
    names = info.metadata.get("architectures")
    if isinstance(names, list) and names and not any(word in str(names[0]) for word in _WRITERS):
        return frozenset({Capability.EMBEDDING})
    chat = frozenset({Capability.CHAT}) if info.has_chat_template else frozenset()
    return chat | {Capability.COMPLETION, Capability.EMBEDDING}


def _problem(info: ModelInfo | None, settings: _Settings, row: EngineRow | None) -> str | None:
    """Why the model cannot be served here, or None."""
    if row is None:
        return _no_engine(settings.engine)
    if row.name == "parts" and info is not None and info.format is not Format.SPLIT:
        return f"the engine parts takes split models, {info.path} is {info.format.value}: make one with 'pagein split'"
    if info is not None and info.format not in row.formats:
        takes = ", ".join(sorted(row.formats)) or "a command"
        return f"the engine {row.name} takes {takes}; {info.path} is {info.format.value}"
    wanted = settings.options.get("server")
    if row.name == "llama_cpp" and wanted not in (None, BUILT_IN_SERVER) and settings.program is None:
        return f"there is no program {wanted!r} (option `server`)"
    if settings.version == "not installed":
        how = f"pip install 'pagein[{row.extra}]'" if row.extra else f"install {', '.join(sum(row.packages, ()))}"
        return f"the engine {row.name} is not installed: {how}"
    if info is not None and info.format is Format.GGUF:
        kind = info.metadata.get("kind")
        if kind in _NOT_SERVED or info.architecture == "clip":
            return f"{info.path} is {_NOT_SERVED.get(str(kind), 'a vision projector')}, not a model"
    if row.name == "transformers" and info is not None and not (info.path / "config.json").is_file():
        return f"{info.path} has no config.json beside its weights: name the folder that transformers wrote"
    if row.name == "parts" and info is not None and info.split is not None and not info.split.capabilities:
        kinds = ", ".join(sorted({task.kind for task in info.split.tasks.values()}))
        return f"{info.path}: its tasks are of kind {kinds}, of which none is served; load it with pagein.load_parts"
    return _recipe_problem(settings) or unknown_option(row.name, settings.recipe, settings.options)


def _one_memory(settings: _Settings, choice: Choice, machine: MachineSnapshot) -> str | None:
    """Weights that are copied to a device would be there twice where its memory is the machine's own."""
    if settings.engine not in _KEEPS_WITHIN or choice.device == "cpu" or not machine.unified:
        return None
    return f"device is {choice.device}, whose memory is the CPU's: set device: cpu for the engine {settings.engine}"


def _no_engine(engine: str) -> str:
    return f"there is no engine {engine!r}; known: {', '.join(known_engines())}"


def _recipe_problem(settings: _Settings) -> str | None:
    """What is wrong with the recipe, of which engines of other packages think as they like."""
    if settings.engine != "onnx":
        useless = settings.recipe is not None and settings.engine in ENGINES
        return f"a recipe is for ONNX models, not for the engine {settings.engine}: leave it out" if useless else None
    known = ", ".join(RECIPE_CAPABILITIES)
    if settings.recipe is None:
        return f"an ONNX model needs a recipe that says what it does: set `recipe` to one of {known}"
    if settings.recipe not in RECIPE_CAPABILITIES:
        return f"there is no recipe {settings.recipe!r}; known: {known}"
    return None
