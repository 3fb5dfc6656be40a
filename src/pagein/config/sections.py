"""The sections of the settings beside the models: every key, its type, its default and its description, once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pagein.config.values import ComputeLock, Count, Duration, Kind, Margin, Size, SizeOrShare


def rule(message: str, *keys: str) -> PydanticCustomError:
    """Return the error for keys that contradict each other; their names, from the section on, come along."""
    return PydanticCustomError("rule", "{message}", {"message": message, "keys": keys})


class LimitMode(StrEnum):
    """What keeps a worker within its allowance."""

    AUTO = "auto"
    """A cgroup of its own where the system allows, else the watchdog."""
    WATCHDOG = "watchdog"
    """It is measured, and ended when it outgrew its allowance and the margin."""
    OFF = "off"
    """It is ended only when the pool's budget is passed."""


class Section(BaseModel):
    """A group of settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Server(Section):
    """Where and how the daemon answers HTTP."""

    host: str = Field("127.0.0.1", description="Address to listen on. Any but loopback needs an `api_key`.")
    port: Count = Field(7311, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: str | None = Field(
        None,
        min_length=8,
        repr=False,
        description="Key that clients send as `Authorization: Bearer …`. "
        "Better kept out of the file, in the variable `PAGEIN_SERVER__API_KEY`.",
        examples=["a-long-random-text"],
        json_schema_extra={"absent": "none, so everybody who reaches the port may call"},
    )
    cors: list[str] = Field(
        default_factory=list,
        description="Origins that browsers may call from.",
        examples=[["https://chat.example.org"]],
        json_schema_extra={"absent": "none, so no page of another origin may call"},
    )
    max_body: Size = Field(64 * 1024**2, ge=1024, description="Largest request body.")
    plain_wait: Duration | None = Field(
        None,
        gt=0,
        description="Longest wait of a request that does not stream for its model; after it 503 with `Retry-After`, "
        "while the load goes on. For clients that give up on a silent connection.",
        examples=["50s"],
        json_schema_extra={"absent": "as long as `scheduler.max_wait`"},
    )
    heartbeat: Duration = Field(
        5.0, gt=0, description="Pause between comments (SSE) to a streaming client that waits for its model."
    )


class Scheduler(Section):
    """How requests wait, and how models come and go."""

    low_linger: Duration = Field(0.0, description="How long a model of low priority stays after its last use.")
    max_wait: Duration = Field(
        300.0, gt=0, description="Longest wait for a model, its load included, before the request is refused."
    )
    patience: Duration = Field(
        30.0, gt=0, description="How long a request waits for memory before busy models must yield a turn."
    )
    min_residency: Duration = Field(
        2.0,
        description="How long a model that was just loaded stays before another takes its room; "
        "shorter by itself where that brings it no requests. Never longer than `patience`.",
    )
    hold: Duration = Field(
        10.0,
        description="Longest time that an idle model is kept for a client that pauses between its requests "
        "(an agent that runs tools): twice the pauses seen, at most this, and never longer than `patience`.",
    )
    compute_lock: ComputeLock = Field(
        True,
        description="Let heavy models of one device compute one at a time, in the order of their requests.",
        examples=[{"cpu": True, "cuda:0": False}],
        json_schema_extra={"absent": "true, on every device"},
    )
    heavy_above: Size = Field(1024**3, description="Weights above which a model counts as heavy.")
    sample_every: Duration = Field(0.5, gt=0, description="Pause between measurements of the workers' memory.")

    def locks(self, device: str) -> bool:
        """Whether heavy models compute one at a time on a device (``cpu``, ``cuda:N``)."""
        lock = self.compute_lock
        return lock if isinstance(lock, bool) else lock.get(device, True)

    @model_validator(mode="after")
    def _patience_bounds(self) -> Scheduler:
        """A default is cut to the patience in silence, since that is what its description says; a wish is not."""
        for key in ("min_residency", "hold"):
            seconds = getattr(self, key)
            if key in self.model_fields_set and seconds > self.patience:
                raise rule(
                    f"{key} ({seconds:g} s) is longer than patience ({self.patience:g} s), which ends it",
                    key,
                    "patience",
                )
        return self


class Supervisor(Section):
    """How worker processes are started, watched and stopped."""

    ready_timeout: Duration = Field(300.0, gt=0, description="Longest load of a model.")
    grace: Duration = Field(5.0, description="Time between SIGTERM and SIGKILL.")
    backoff_first: Duration = Field(
        1.0, gt=0, description="Pause after the first failed load; doubles with each further one."
    )
    backoff_max: Duration = Field(60.0, gt=0, description="Longest pause between failed loads.")
    limits: Annotated[LimitMode, Kind("`auto`, `watchdog`, `off`")] = Field(
        LimitMode.AUTO,
        description="What keeps a worker within its allowance. `auto`: a cgroup of its own where the system allows, "
        "else the watchdog; `watchdog`: measured, and ended when it outgrew it; `off`: only when the budget is passed.",
    )
    limit_margin: Margin = Field(
        0.1,
        description="What a worker may take beyond its allowance before it is ended, a share being one of the "
        "allowance; at least 64 MiB.",
    )
    release_timeout: Duration = Field(
        10.0, gt=0, description="Longest wait for the memory of a worker that ended; what stays then is charged."
    )
    adopt: bool = Field(
        False,
        description="Workers outlive a daemon that was killed, and the next one takes those over "
        "whose configuration is unchanged.",
    )
    adopt_wait: Duration = Field(60.0, gt=0, description="How long a worker without a daemon waits for the next one.")
    log_bytes: Size = Field(10 * 1024**2, ge=1024, description="Size at which a model's log is rotated.")
    log_files: Count = Field(3, ge=1, description="Rotated logs kept per model.")

    @model_validator(mode="after")
    def _backoff_grows(self) -> Supervisor:
        if self.backoff_max < self.backoff_first:
            raise rule(
                f"backoff_max ({self.backoff_max:g} s) is shorter than backoff_first ({self.backoff_first:g} s)",
                "backoff_max",
                "backoff_first",
            )
        return self


def state_switch(wish: object) -> bool | None:
    """Return what ``state: off`` and ``state: on`` mean; None for anything else."""
    if isinstance(wish, str):
        return {"on": True, "off": False}.get(wish.strip().lower())
    return wish if isinstance(wish, bool) else None


class State(Section):
    """What outlives a model's stay in memory: conversations, and snapshots of their KV caches."""

    enabled: bool = Field(
        True, description="Keep conversations and snapshots. `false`: nothing of them is written or read."
    )
    retain: Duration = Field(
        30 * 86400.0, gt=0, description="How long a conversation and its snapshots are kept after their last use."
    )
    history_bytes: Size = Field(
        1024**3,
        ge=1024**2,
        description="Most that the file of conversations may take; those used longest ago leave first.",
    )
    disk: SizeOrShare | None = Field(
        None,
        description="Most that snapshots and KV blocks may take on the disk: a size, or a share of what is free there.",
        examples=["20GiB"],
        json_schema_extra={"absent": "20 GiB or 10 % of what is free, whichever is less"},
    )
    salt: str | None = Field(
        None,
        min_length=8,
        repr=False,
        description="What conversations and snapshots are kept apart by, in place of `server.api_key`: "
        "with it they stay when the key changes. Better kept in the variable `PAGEIN_STATE__SALT`.",
        examples=["a-long-random-text"],
        json_schema_extra={"absent": "the key, where there is one"},
    )
