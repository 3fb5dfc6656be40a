"""How llama.cpp is set up: one resolved value, rendered for llama-server and for the library's parameters.

Every buffer that llama.cpp takes is set here and nowhere left to its own default, so that the catalog can count it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagein.engines import llama_state
from pagein.engines.local.threads import compute_threads
from pagein.engines.options import read_options
from pagein.errors import ConfigError, LoadFailed
from pagein.protocol import Capability, WorkerSpec

if TYPE_CHECKING:
    import xllamacpp

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
ALL_LAYERS = 999
_QUIET = 2  # warnings and errors


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """The options of the llama_cpp engine."""

    server: str | None = None
    """A llama-server program; ``builtin`` = the library even where one is on the PATH."""
    cache_ram: int = 0
    """MiB of finished prompts that llama.cpp keeps in RAM to reuse them."""
    batch: int = 2048
    """Tokens of prompt that one step takes at most."""
    ubatch: int | None = None
    """Tokens that are computed at once: sets the compute buffers. None = 256 on a CPU, 512 on a GPU; the whole context
    for embedding and reranking, where a text is pooled in one step (not for pooling ``last``)."""
    checkpoints: int = 2
    """Copies of the sliding-window or recurrent state kept per request slot, for prompts that go on."""
    embedding: bool = False
    """Serve embeddings instead of text."""
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None = None
    """How token vectors become one; None = as the model says."""
    rerank: bool = False
    """Serve reranking; the model must be a reranker."""
    cache_type_k: CacheType = "f16"
    """Type of the keys in the KV cache."""
    cache_type_v: CacheType = "f16"
    """Type of the values in the KV cache."""
    flash_attention: Literal["auto"] | bool = "auto"
    """Use flash attention."""
    swa_full: bool = False
    """Keep all tokens of sliding-window layers, not the window only: more memory, but a conversation that goes on
    after it was saved is computed from where it ended instead of from its last checkpoint."""
    gpu_layers: int | None = None
    """Layers on the GPU; None = all on a GPU, none on a CPU."""
    mmap: bool = True
    """Map the weights instead of reading them."""
    warmup: bool = True
    """Run once empty while loading: the buffers are really taken before the model counts as loaded."""
    chat_template: str | None = None
    """A built-in template's name or Jinja text; None = the model's own."""
    verbosity: int = _QUIET
    """Log level of llama.cpp: 1 errors, 2 warnings, 3 information."""
    args: list[str] = field(default_factory=list)
    """Further arguments of a llama-server program, passed on as they are."""


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Everything that llama.cpp is told."""

    name: str
    path: str
    context: int | None
    parallel: int
    threads: int
    ubatch: int
    batch: int
    gpu_layers: int
    on_gpu: bool
    options: LlamaOptions
    slots_folder: str | None = None
    """Where conversations are saved to; None = they are not."""

    @property
    def total_context(self) -> int:
        """Tokens over all request slots; 0 = as the model was trained."""
        return (self.context or 0) * self.parallel

    @property
    def capabilities(self) -> list[Capability]:
        """What the model is served for."""
        if self.options.rerank:
            return [Capability.RERANK]
        if self.options.embedding:
            return [Capability.EMBEDDING]
        return [Capability.CHAT, Capability.COMPLETION]


def resolve(spec: WorkerSpec) -> LlamaSettings:
    """Turn a spec into settings; raises ConfigError for options that cannot be, LoadFailed without a file."""
    options = read_options(LlamaOptions, spec.options, spec.name)
    if spec.path is None:
        raise ConfigError(f"model {spec.name!r}: the engine llama_cpp needs a model file")
    if not os.path.isfile(spec.path):
        raise LoadFailed(f"there is no file {spec.path}")
    on_gpu = spec.device != "cpu"
    ubatch = options.ubatch or _ubatch(options, spec.context, on_gpu)
    layers = options.gpu_layers if options.gpu_layers is not None else ALL_LAYERS
    return LlamaSettings(
        name=spec.name,
        path=spec.path,
        context=spec.context,
        parallel=spec.parallel,
        threads=compute_threads(spec),
        ubatch=ubatch,
        batch=max(options.batch, ubatch),
        gpu_layers=layers if on_gpu else 0,
        on_gpu=on_gpu,
        options=options,
        slots_folder=llama_state.folder_for(spec, vectors=options.embedding or options.rerank, args=options.args),
    )


def _ubatch(options: LlamaOptions, context: int | None, on_gpu: bool) -> int:
    # Measured on two cores without a GPU: 128 to 1024 tokens at once prefill alike, each doubling costs buffers.
    usual = 512 if on_gpu else 256
    if (options.embedding or options.rerank) and options.pooling != "last":
        return max(usual, context or 512)  # llama.cpp refuses a text that it cannot pool in one step
    return usual


def server_arguments(settings: LlamaSettings) -> list[str]:
    """The arguments of llama-server, less its address: those that every version of it knows."""
    options = settings.options
    arguments = ["--model", settings.path, "--alias", settings.name]
    numbers = {
        "--ctx-size": settings.total_context,
        "--parallel": settings.parallel,
        "--batch-size": settings.batch,
        "--ubatch-size": settings.ubatch,
        "--threads": settings.threads,
        "--threads-batch": settings.threads,
        "--threads-http": _http_threads(settings),
        "--n-gpu-layers": settings.gpu_layers,
        "--poll": 0,
    }
    for name, number in numbers.items():
        arguments += [name, str(number)]
    arguments += ["--cache-type-k", options.cache_type_k, "--cache-type-v", options.cache_type_v]
    if options.embedding or options.rerank:
        arguments += ["--reranking" if options.rerank else "--embedding"]
    if options.pooling is not None:
        arguments += ["--pooling", options.pooling]
    if options.chat_template is not None:
        arguments += ["--chat-template", options.chat_template]
    arguments += ["--no-mmap"] if not options.mmap else []
    arguments += ["--no-warmup"] if not options.warmup else []
    arguments += ["--slot-save-path", settings.slots_folder] if settings.slots_folder is not None else []
    return [*arguments, "--no-webui", *options.args]


def server_environment(settings: LlamaSettings) -> dict[str, str]:
    """Settings that older llama-servers do not have: an unknown variable is ignored, an unknown argument is fatal."""
    options = settings.options
    flash = {"auto": "auto", True: "on", False: "off"}[options.flash_attention]
    environment = {
        "LLAMA_ARG_CACHE_RAM": str(options.cache_ram),
        "LLAMA_ARG_CTX_CHECKPOINTS": str(options.checkpoints),
        "LLAMA_ARG_FLASH_ATTN": flash,
        "LLAMA_ARG_FIT": "off",
        "LLAMA_ARG_KV_UNIFIED": "false",
        "LLAMA_ARG_JINJA": "true",
        "LLAMA_ARG_OFFLINE": "true",
        "LLAMA_ARG_ENDPOINT_SLOTS": _word(settings.slots_folder is not None),
        "LLAMA_ARG_SWA_FULL": _word(options.swa_full),
        "LLAMA_ARG_CORS_ORIGINS": "localhost",
        "LLAMA_ARG_LOG_VERBOSITY": str(options.verbosity),
    }
    if not settings.on_gpu:
        environment["LLAMA_ARG_DEVICE"] = "none"
    return environment


def library_parameters(settings: LlamaSettings) -> xllamacpp.CommonParams:
    """The same settings for the library, less the address."""
    import xllamacpp

    options = settings.options
    if options.args:
        raise ConfigError(f"model {settings.name!r}: option 'args' needs a llama-server; set option 'server'")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings.path
    parameters.model_alias = {settings.name}
    parameters.warmup = options.warmup
    parameters.verbosity = options.verbosity
    parameters.offline = True
    parameters.ui = False
    parameters.endpoint_slots = settings.slots_folder is not None
    if settings.slots_folder is not None:
        parameters.slot_save_path = os.path.join(settings.slots_folder, "")  # it only joins the two texts
    parameters.cors_origins = "localhost"
    if options.chat_template is not None:
        parameters.chat_template = options.chat_template
    _set_sizes(parameters, settings)
    _set_kinds(parameters, options)
    return parameters


def _set_sizes(parameters: xllamacpp.CommonParams, settings: LlamaSettings) -> None:
    parameters.n_ctx = settings.total_context
    parameters.n_parallel = settings.parallel
    parameters.n_batch, parameters.n_ubatch = settings.batch, settings.ubatch
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = settings.threads
        threads.poll = 0
    parameters.n_threads_http = _http_threads(settings)
    parameters.n_gpu_layers = settings.gpu_layers
    parameters.fit_params = False
    parameters.kv_unified = False
    parameters.cache_ram_mib = settings.options.cache_ram
    parameters.cache_idle_slots = settings.options.cache_ram > 0
    parameters.n_ctx_checkpoints = settings.options.checkpoints
    parameters.swa_full = settings.options.swa_full


def _set_kinds(parameters: xllamacpp.CommonParams, options: LlamaOptions) -> None:
    import xllamacpp

    flash = {"auto": "AUTO", True: "ENABLED", False: "DISABLED"}[options.flash_attention]
    pooling = "rank" if options.rerank else options.pooling
    parameters.cache_type_k = _member(xllamacpp.ggml_type, f"GGML_TYPE_{options.cache_type_k}")
    parameters.cache_type_v = _member(xllamacpp.ggml_type, f"GGML_TYPE_{options.cache_type_v}")
    parameters.flash_attn_type = _member(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    parameters.embedding = options.embedding or options.rerank
    if pooling is not None:
        parameters.pooling_type = _member(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling}")
    if not options.mmap:
        parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE


def _word(switch: bool) -> str:
    return "true" if switch else "false"


def _member(kind: object, name: str) -> object:
    return getattr(kind, name.upper())


def _http_threads(settings: LlamaSettings) -> int:
    return settings.parallel + 4  # one per open connection: requests, health, cancelled ones that still end
