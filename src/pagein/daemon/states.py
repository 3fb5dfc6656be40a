"""From settings and catalog to what the scheduler needs to know."""

from __future__ import annotations

from pagein.catalog.model import ModelEntry
from pagein.catalog.observed import PeakStore
from pagein.config.schema import LimitMode, Settings
from pagein.protocol import Capability
from pagein.scheduler import Limits, ModelState


def model_state(settings: Settings, entry: ModelEntry, peaks: PeakStore) -> ModelState:
    """What the scheduler needs to know of a configured model."""
    model, seen = settings.models[entry.name], peaks.peak(entry.peak_key)
    heavy = model.heavy if model.heavy is not None else _weights(entry) > settings.scheduler.heavy_above
    return ModelState(
        name=entry.name,
        priority=model.priority.value,
        need=dict(entry.need.bytes),
        need_source=entry.need.source.value,
        parallel=model.parallel_for(entry.engine) + _ahead(entry),
        queue_limit=model.queue,
        keep_alive=model.keep_alive,
        pinned=model.pin,
        device=entry.device,
        heavy=heavy,
        problem=entry.problem,
        adjusts=entry.least is not None,
        load_seconds=seen.load_seconds if seen is not None else None,
    )


def _weights(entry: ModelEntry) -> int:
    """Bytes of weights: of the model's file where there is one, else what it needs in all."""
    if entry.info is not None:
        return entry.info.weight_bytes
    return max(entry.need.bytes.values(), default=0)


def _ahead(entry: ModelEntry) -> int:
    """Requests that a worker holds beyond those it computes: one, where they are short, so that it never waits.

    Workers of other engines hold several anyway; one that writes text keeps its time-out for itself.
    """
    writes = entry.capabilities & {Capability.CHAT, Capability.COMPLETION}
    return 1 if entry.engine == "llama_cpp" and not writes else 0


def limits(settings: Settings, watched: frozenset[str]) -> Limits:
    """The scheduler's bounds from the configuration; ``watched`` pools have no cgroups and are left to the watchdog."""
    wanted, sup = settings.scheduler, settings.supervisor
    return Limits(
        low_linger=wanted.low_linger,
        max_wait=wanted.max_wait,
        patience=wanted.patience,
        backoff_first=sup.backoff_first,
        backoff_max=sup.backoff_max,
        min_residency=wanted.min_residency,
        hold=wanted.hold,
        compute_lock=wanted.compute_lock if isinstance(wanted.compute_lock, bool) else dict(wanted.compute_lock),
        margin=sup.limit_margin,
        watched=watched,
    )


def watched_pools(settings: Settings, pools: list[str], hard: bool) -> frozenset[str]:
    """The pools whose workers the watchdog ends: RAM where there are no cgroups, and GPUs, which never have any."""
    if settings.supervisor.limits is LimitMode.OFF:
        return frozenset()
    return frozenset(pool for pool in pools if pool != "ram" or not hard)
