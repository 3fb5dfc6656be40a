"""The settings: every key, its type, its default and its description, once.

The example file and the reference page are rendered from this module (``pagein.config.render``).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from pydantic import AfterValidator, Field, model_validator

from pagein.config.sections import LimitMode, Scheduler, Section, Server, State, Supervisor, rule, state_switch
from pagein.config.values import (
    Command,
    Count,
    Device,
    Duration,
    EngineOptions,
    Environment,
    FilePath,
    KeepAlive,
    Kind,
    ModelName,
    Pool,
    Size,
    SizeOrShare,
    did_you_mean,
    is_loopback,
)

__all__ = [
    "ALIASES",
    "DEFAULT_PARALLEL",
    "DEFAULT_TIMEOUTS",
    "OTHER_PARALLEL",
    "LimitMode",
    "Model",
    "Priority",
    "Scheduler",
    "Section",
    "Server",
    "Settings",
    "State",
    "Supervisor",
    "section_of",
]

DEFAULT_TIMEOUTS: dict[str, float] = {
    "chat": 300.0,
    "completion": 300.0,
    "embedding": 30.0,
    "rerank": 30.0,
    "transcription": 120.0,
    "classification": 30.0,
    "saliency": 30.0,
    "text-classification": 30.0,
    "token-classification": 30.0,
}
"""Seconds that a worker may be silent during a request, by capability; the keys are the values of `Capability`."""

DEFAULT_PARALLEL: dict[str, int] = {"llama_cpp": 1, "whisper": 1, "transformers": 2, "parts": 2}
"""Requests that a worker holds at once, by engine: those that keep state per request count each of them in memory."""
OTHER_PARALLEL = 4
"""The same for every other engine."""

SLEEPLESS = frozenset({"llama_cpp"})
"""Engines of this package that have no state between loaded and ended."""

ALIASES = {"max_context_length": "context", "estimated_memory_bytes": "memory"}
"""Other names of a model's keys."""


def _capability(word: str) -> str:
    if word in DEFAULT_TIMEOUTS:
        return word
    known = ", ".join(DEFAULT_TIMEOUTS)
    raise ValueError(f"there is no capability {word!r}: {known}{did_you_mean(word, DEFAULT_TIMEOUTS)}")


class Priority(StrEnum):
    """How long a model stays (row G2)."""

    HIGH = "high"
    """Loaded at start and never evicted."""
    MEDIUM = "medium"
    """Loaded on first use, stays while there is room."""
    LOW = "low"
    """Loaded on use and unloaded after it, `scheduler.low_linger` later."""


class Model(Section):
    """One model: one of `model` and `command` is needed, the rest has defaults."""

    model: FilePath | None = Field(
        None,
        description="Model file or folder.",
        examples=["models/chat.gguf"],
        json_schema_extra={"absent": "none; a model without `command` needs it"},
    )
    command: Command | None = Field(
        None,
        description="Command line of any server with an OpenAI-style API, run without a shell; "
        "`${port}` or `${socket}` in it is filled in.",
        examples=["my-server --port ${port}"],
        json_schema_extra={"absent": "none; a model without `model` needs it"},
    )
    engine: str | None = Field(
        None,
        min_length=1,
        description="What computes: `llama_cpp`, `onnx`, `whisper`, `transformers`, `parts`, `command`, or an engine "
        "of another package.",
        examples=["llama_cpp"],
        json_schema_extra={"absent": "told from the file's own header"},
    )
    recipe: str | None = Field(
        None,
        min_length=1,
        description="What an ONNX model does with its input and output: a built-in name; its `options` refine it.",
        examples=["embedding"],
        json_schema_extra={"absent": "none"},
    )
    capabilities: list[Annotated[str, AfterValidator(_capability)]] | None = Field(
        None,
        min_length=1,
        description=f"What the server of a `command` offers: {', '.join(f'`{c}`' for c in DEFAULT_TIMEOUTS)}.",
        examples=[["chat", "embedding"]],
        json_schema_extra={"absent": "`command`: chat, completion; else told by the engine"},
    )
    priority: Annotated[Priority, Kind("`high`, `medium`, `low`")] = Field(
        Priority.MEDIUM,
        description="`high`: loaded at start, never evicted; `medium`: stays while there is room; "
        "`low`: used and left.",
    )
    pin: bool = Field(False, description="Never evicted while true, whatever the priority.")
    context: Count | None = Field(
        None,
        ge=16,
        description="Tokens of context per request; a longer prompt is refused.",
        examples=[4096],
        json_schema_extra={"absent": "the engine's default for this model"},
    )
    memory: Size | None = Field(
        None,
        gt=0,
        description="Declared need of the whole worker, used until a peak was measured. With `transformers` and "
        "`parts` what the worker keeps within: weights beyond it are streamed from the disk, idle parts leave.",
        examples=["600MiB"],
        json_schema_extra={
            "absent": "estimated from the file's header; `transformers`, `parts`: all of it, or half of what the "
            "budget can give"
        },
    )
    device: Device = Field(
        "auto", description="`cpu`, `gpu`, `cuda:N`, or `auto`: the GPU where there is one that can hold it."
    )
    cpus: list[Annotated[Count, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="Cores that this model may use (CPU affinity).",
        examples=[[0, 1]],
        json_schema_extra={"absent": "all"},
    )
    threads: Count | None = Field(
        None,
        ge=1,
        description="Compute threads.",
        examples=[2],
        json_schema_extra={"absent": "one per core that it may use"},
    )
    timeout: Duration | None = Field(
        None,
        gt=0,
        description="Longest silence of the worker during a request.",
        examples=["60s"],
        json_schema_extra={"absent": "by capability"},
    )
    queue: Count = Field(64, ge=0, description="Requests that may wait for it; one more is refused with 429.")
    parallel: Count | None = Field(
        None,
        ge=1,
        description="Requests that the worker holds at once.",
        examples=[2],
        json_schema_extra={
            "absent": f"{', '.join(f'{n} for {e}' for e, n in DEFAULT_PARALLEL.items())}, else {OTHER_PARALLEL}"
        },
    )
    env: Environment = Field(
        default_factory=dict,
        repr=False,  # tokens of model hubs live here
        description="Environment variables of the worker.",
        examples=[{"OMP_NUM_THREADS": "2"}],
        json_schema_extra={"absent": "none"},
    )
    keep_alive: KeepAlive | None = Field(
        None,
        description="Idle time after which it is unloaded; `-1`: never for being idle. "
        "A request may wish otherwise for a while.",
        examples=["5m"],
        json_schema_extra={"absent": "by priority"},
    )
    heavy: bool | None = Field(
        None,
        description="Whether it computes alone on its device (`scheduler.compute_lock`).",
        examples=[True],
        json_schema_extra={"absent": "when its weights pass `scheduler.heavy_above`"},
    )
    sleep: bool = Field(
        False,
        description="Instead of leaving it sleeps first, where its engine can (`whisper`, `onnx`, `transformers`; "
        "`command`: a server with vLLM's `POST /sleep` and `/wake_up`); what it keeps is charged.",
    )
    options: EngineOptions = Field(
        default_factory=dict,
        description="Options of the engine or the recipe.",
        examples=[{"cache_ram": 0}],
        json_schema_extra={"absent": "none"},
    )

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for alias, name in ALIASES.items():
            if alias in value and name in value:
                raise rule(f"{alias} and {name} are the same setting: give one of them", alias, name)
        return {ALIASES.get(key, key): item for key, item in value.items()}

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.model is None) == (self.command is None):
            raise rule("a model needs exactly one of `model` and `command`", "model", "command")
        if self.command is not None and self.recipe is not None:
            raise rule("a recipe is for a model file, not for a command", "recipe", "command")
        if self.keep_alive is not None and self.priority is Priority.HIGH:
            raise rule(
                "keep_alive has no meaning at priority high, which never leaves; use medium",
                "keep_alive",
                "priority",
            )
        if self.sleep and self.priority is Priority.HIGH:
            raise rule("sleep has no meaning at priority high, which never leaves; use medium", "sleep", "priority")
        if self.sleep and self.engine in SLEEPLESS:
            raise rule(f"sleep is set, but the engine {self.engine} cannot sleep", "sleep", "engine")
        return self

    def timeout_for(self, capability: str) -> float:
        """Seconds that the worker may be silent during a request of a capability."""
        return self.timeout if self.timeout is not None else DEFAULT_TIMEOUTS[capability]

    def parallel_for(self, engine: str) -> int:
        """Requests that the worker holds at once with an engine."""
        return self.parallel if self.parallel is not None else DEFAULT_PARALLEL.get(engine, OTHER_PARALLEL)


class Settings(Section):
    """A whole configuration."""

    budget: Annotated[dict[Pool, SizeOrShare], Kind("size or share, or those by pool")] = Field(
        default_factory=dict,
        description="The memory that all models together may take: a size (`6GiB`) or a share (`85%`, `0.85`) of RAM, "
        "or one per pool (`ram`, `cuda:0`).",
        examples=[{"ram": "6GiB", "cuda:0": "85%"}],
        json_schema_extra={"absent": "90 % of what the machine or its cgroup really has, in each pool"},
    )
    state_dir: FilePath = Field(
        default_factory=lambda: Path(platformdirs.user_state_dir("pagein")),
        description="Folder of logs, sockets and remembered peaks; readable by its owner only.",
        examples=["~/.local/state/pagein"],
        json_schema_extra={
            "absent": "Linux: `$XDG_STATE_HOME/pagein` (`~/.local/state/pagein`); "
            "macOS: `~/Library/Application Support/pagein`"
        },
    )
    server: Server = Field(default_factory=Server, description="The HTTP door.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="Waiting and eviction.")
    supervisor: Supervisor = Field(default_factory=Supervisor, description="Worker processes.")
    state: State = Field(
        default_factory=State, description="Conversations and snapshots; `off` switches all of it off."
    )
    models: dict[ModelName, Model] = Field(
        default_factory=dict, description="The models, by the name that clients use."
    )

    @model_validator(mode="before")
    @classmethod
    def _budget_shorthand(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("budget"), str | int | float):
            value = {**value, "budget": {"ram": value["budget"]}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _state_switch(cls, value: Any) -> Any:
        if isinstance(value, dict) and (switched := state_switch(value.get("state"))) is not None:
            value = {**value, "state": {"enabled": switched}}
        return value

    @model_validator(mode="after")
    def _key_beyond_loopback(self) -> Settings:
        if not is_loopback(self.server.host) and self.server.api_key is None:
            raise rule(
                f"{self.server.host!r} is not a loopback address, so a key is needed: "
                "set server.api_key (or the variable PAGEIN_SERVER__API_KEY)",
                "server.host",
                "server.api_key",
            )
        return self

    @model_validator(mode="after")
    def _waits_agree(self) -> Settings:
        plain, longest = self.server.plain_wait, self.scheduler.max_wait
        if plain is not None and plain > longest:
            raise rule(
                f"plain_wait ({plain:g} s) is longer than scheduler.max_wait ({longest:g} s), which ends every wait",
                "server.plain_wait",
                "scheduler.max_wait",
            )
        return self


def section_of(key: tuple[str | int, ...]) -> type[Section] | None:
    """Return the section that a dotted key names, or None where it names something else."""
    match key:
        case ():
            return Settings
        case ("server",):
            return Server
        case ("scheduler",):
            return Scheduler
        case ("supervisor",):
            return Supervisor
        case ("state",):
            return State
        case ("models", _):
            return Model
    return None
