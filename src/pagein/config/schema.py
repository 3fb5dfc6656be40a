"""The settings: every key, its type, its default and its description, once.

The example file and the reference page are rendered from this module (``pagein.config.render``).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pagein.units import parse_bytes, parse_duration, parse_percent


def _size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def _size_or_share(value: Any) -> Any:
    if isinstance(value, str):
        share = parse_percent(value)
        return share if share is not None else parse_bytes(value)
    return value


def _command(value: Any) -> Any:
    import shlex

    return shlex.split(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
"""Bytes; written as ``6GiB``, ``500MB`` or a number."""
Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0)]
"""Seconds; written as ``30s``, ``5m``, ``250ms`` or a number."""
SizeOrShare = Annotated[int | float, BeforeValidator(_size_or_share)]
"""Bytes (int), or a share of what the machine has (float above 0, at most 1); written as ``6GiB`` or ``85%``."""


class Priority(StrEnum):
    """How long a model stays (row G2)."""

    HIGH = "high"
    """Loaded at start and never evicted."""
    MEDIUM = "medium"
    """Loaded on first use, stays while there is room."""
    LOW = "low"
    """Loaded on use and unloaded after it, `scheduler.low_linger` later."""


class Section(BaseModel):
    """A group of settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(Section):
    """Where and how the daemon answers HTTP."""

    host: str = Field("127.0.0.1", description="Address to listen on. Any other than loopback requires an API key.")
    port: int = Field(7311, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: str | None = Field(
        None, min_length=8, description="Key that clients send as `Authorization: Bearer …`. Better set as PAGEIN_SERVER__API_KEY."
    )
    cors: list[str] = Field(default_factory=list, description="Origins that browsers may call from; empty = none.")
    max_body: Size = Field(64 * 1024**2, description="Largest request body.")
    heartbeat: Duration = Field(5.0, gt=0, description="Pause between SSE comments to a streaming client that waits.")


class Scheduler(Section):
    """How requests wait and models come and go."""

    low_linger: Duration = Field(0.0, description="How long an idle model of low priority stays.")
    max_wait: Duration = Field(300.0, gt=0, description="Longest wait for a model, its load included, before a clear refusal.")
    patience: Duration = Field(
        30.0, gt=0, description="How long a request waits for memory before busy models must yield a turn."
    )
    sample_every: Duration = Field(0.5, gt=0, description="Pause between measurements of the workers' memory.")


class Supervisor(Section):
    """How worker processes are started, watched and stopped."""

    ready_timeout: Duration = Field(300.0, gt=0, description="Longest load of a model.")
    grace: Duration = Field(5.0, description="Time between SIGTERM and SIGKILL.")
    backoff_first: Duration = Field(1.0, gt=0, description="Pause after the first failed load; doubles with each further one.")
    backoff_max: Duration = Field(60.0, gt=0, description="Longest pause between failed loads.")
    log_bytes: Size = Field(10 * 1024**2, description="Size at which a model's log is rotated.")
    log_files: int = Field(3, ge=1, description="Rotated logs kept per model.")


class Model(Section):
    """One model. Needs one of `model` and `command`; the rest has defaults."""

    model: Path | None = Field(None, description="Model file or folder; the engine is told from the file's own header.")
    command: Annotated[list[str], BeforeValidator(_command)] | None = Field(
        None, description="Command line of any server with an OpenAI-style API; `${port}` or `${socket}` is filled in."
    )
    engine: str | None = Field(None, description="Engine; None = told from the file.")
    recipe: str | None = Field(None, description="Pre/post-processing of an ONNX model: a built-in name, with `options`.")
    capabilities: list[str] | None = Field(None, description="What a `command` server offers; default chat, completion.")
    priority: Priority = Field(Priority.MEDIUM, description="high = loaded at start, never evicted; medium = stays while there is room; low = used and left.")
    pin: bool = Field(False, description="Never evicted while true, whatever the priority.")
    context: int | None = Field(None, ge=16, description="Tokens of context per request; longer prompts are refused. Alias: max_context_length.")
    memory: Size | None = Field(None, description="Declared need; used until a peak was measured. Alias: estimated_memory_bytes.")
    device: str = Field("auto", pattern=r"^(cpu|gpu|auto|cuda:\d+)$", description="cpu, gpu, cuda:N or auto (gpu where there is one that can hold it).")
    cpus: list[int] | None = Field(None, min_length=1, description="CPU affinity: the cores that this model may use.")
    threads: int | None = Field(None, ge=1, description="Compute threads; None = one per allowed core.")
    timeout: Duration | None = Field(None, gt=0, description="Longest silence of the worker during a request; None = by capability.")
    queue: int = Field(64, ge=0, description="Requests that may wait for this model; one more is refused with 429.")
    parallel: int | None = Field(None, ge=1, description="Requests that the worker holds at once; None = 1 for llama_cpp and whisper, else 4.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the worker.")
    keep_alive: Duration | None = Field(None, description="Idle time after which the model is unloaded; None = by priority.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the engine or recipe; see its reference page.")

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        if isinstance(value, dict):
            value = dict(value)
            for alias, name in (("max_context_length", "context"), ("estimated_memory_bytes", "memory")):
                if alias in value and name in value:
                    raise ValueError(f"{alias} and {name} are the same setting: give one of them")
                if alias in value:
                    value[name] = value.pop(alias)
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.model is None) == (self.command is None):
            raise ValueError("a model needs exactly one of `model` and `command`")
        return self


class Settings(Section):
    """A whole configuration."""

    budget: dict[str, SizeOrShare] = Field(
        default_factory=dict,
        description="Memory budget: a size or a share (`6GiB`, `85%`) of RAM, or one per pool (`ram`, `cuda:0`). "
        "A pool that is not named gets 90 % of what the machine or its cgroup really has.",
    )
    state_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_state_dir("pagein")),
        description="Folder of logs, sockets and remembered peaks; readable by the owner only.",
    )
    server: Server = Field(default_factory=Server, description="The HTTP door.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="Waiting and eviction.")
    supervisor: Supervisor = Field(default_factory=Supervisor, description="Worker processes.")
    models: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], Model] = Field(
        default_factory=dict, description="The models, by the name that clients use."
    )

    @model_validator(mode="before")
    @classmethod
    def _budget_shorthand(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("budget"), str | int | float):
            value = {**value, "budget": {"ram": value["budget"]}}
        return value

    @model_validator(mode="after")
    def _key_beyond_loopback(self) -> Settings:
        if self.server.host not in ("127.0.0.1", "::1", "localhost") and self.server.api_key is None:
            raise ValueError(f"server.host {self.server.host!r} is not loopback: set server.api_key (PAGEIN_SERVER__API_KEY)")
        return self
