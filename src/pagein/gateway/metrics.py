"""Prometheus metrics. Labels are configured model names, parts and fixed words only, so their number is bounded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagein.errors import PageinError
from pagein.gateway.call import Call
from pagein.gateway.parts_metrics import PartsMetrics
from pagein.gateway.ports import Decision, Desk, Lease
from pagein.gateway.reply import CLIENT_LEFT
from pagein.gateway.snapshot_ports import BlocksView, UsageView

UNKNOWN = "unknown"
"""The label of a model that is not configured, and of a capability that could not be read."""
_POOL_STATES = (
    "budget",
    "effective",
    "own",
    "reserved",
    "resident",
    "releasing",
    "outside",
    "left",
    "free",
    "measured",
    "available",
)
_PRESSURES = ("calm", "tight", "critical")
_WAITS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_ANSWERS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Everything that ``GET /metrics`` shows, in a registry of its own."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "pagein_requests", "Requests that ended.", ("model", "capability", "status"), registry=registry
        )
        self.in_flight = Gauge("pagein_requests_in_flight", "Requests now.", ("model",), registry=registry)
        self.waits = Histogram(
            "pagein_queue_seconds", "Wait for a lease.", ("model",), registry=registry, buckets=_WAITS
        )
        self.answers = Histogram(
            "pagein_request_seconds",
            "Request read to last byte.",
            ("model", "capability"),
            registry=registry,
            buckets=_ANSWERS,
        )
        self.refusals = Counter("pagein_refusals", "Requests without a lease.", ("model", "code"), registry=registry)
        self.evictions = Counter("pagein_evictions", "Models that left for another.", ("model",), registry=registry)
        registry.register(_State(desk))
        registry.register(PartsMetrics(desk))
        self._saved = _Saved(desk)
        registry.register(self._saved)

    def visit(self) -> Visit:
        """Begin to count one request."""
        return Visit(self)

    def label(self, model: str | None) -> str:
        """Return the label for a model that a client or a decision names."""
        return model if model is not None and model in self._desk.names() else UNKNOWN

    def decided(self, decision: Decision) -> None:
        """Count a decision of the scheduler."""
        if decision.kind in ("stop", "sleep") and decision.data.get("evicted_for") is not None:
            self.evictions.labels(self.label(decision.model)).inc()

    async def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        saved = self._desk.snapshots
        self._saved.usage = await saved.usage() if saved is not None else None  # may wait for the disk
        self._saved.blocks = await saved.blocks() if saved is not None else []
        return generate_latest(self.registry)


class Visit:
    """One request as the metrics see it, from its first byte to its last."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._model: str | None = None
        self._capability = UNKNOWN
        self._granted = False
        self._since = 0.0
        self.status = CLIENT_LEFT

    def __enter__(self) -> Visit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "disconnected" if self.status == CLIENT_LEFT else f"{self.status // 100}xx"
        self._metrics.requests.labels(self._model or UNKNOWN, self._capability, outcome).inc()
        if self._model is not None:
            self._metrics.in_flight.labels(self._model).dec()
            self._metrics.answers.labels(self._model, self._capability).observe(time.monotonic() - self._since)

    def is_for(self, call: Call) -> None:
        """Take in what was asked for, once the body was read."""
        self._model = self._metrics.label(call.model)
        self._capability = call.capability.value
        self._since = time.monotonic()
        self._metrics.in_flight.labels(self._model).inc()

    def granted(self, lease: Lease) -> None:
        """Take in how long the lease took."""
        self._granted = True
        self._metrics.waits.labels(self._model).observe(lease.waited_seconds)

    def failed(self, error: PageinError) -> None:
        """Take in how the request ended."""
        self.status = error.http_status
        if self._model is not None and not self._granted:
            self._metrics.refusals.labels(self._model, error.code).inc()


class _State(Collector):
    """What the daemon knows at the moment of asking."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        status = self._desk.status()
        pools = _gauge("pagein_pool_bytes", "Bytes of a pool by state.", ("pool", "state"))
        for pool in status.pools:
            for state in _POOL_STATES:
                _add(pools, (pool.name, state), getattr(pool, state))
        yield pools
        pressure = _gauge("pagein_pressure", "1 at the present level of memory pressure.", ("level",))
        for level in _PRESSURES:
            _add(pressure, (level,), int(status.pressure == level))
        yield pressure
        models = _gauge("pagein_model_bytes", "Bytes of a model by pool and kind.", ("model", "pool", "kind"))
        leases = _gauge("pagein_model_leases", "Leases of a model in use.", ("model",))
        waiting = _gauge("pagein_model_waiting", "Requests that wait for a model.", ("model",))
        resident = _gauge("pagein_model_resident", "1 while a model is in memory.", ("model",))
        loads = CounterMetricFamily("pagein_loads", "Loads of a model.", labels=["model"])
        for model in status.models:
            loads.add_metric([model.name], model.loads)
            for kind, held in (
                ("need", model.need),
                ("held", model.held),
                ("measured", model.measured),
                ("peak", model.peak),
            ):
                for pool_name, count in (held or {}).items():
                    _add(models, (model.name, pool_name, kind), count)
            _add(leases, (model.name,), model.leases)
            _add(waiting, (model.name,), model.waiting)
            _add(resident, (model.name,), int(model.state == "resident"))
        yield from (models, leases, waiting, resident, loads)


class _Saved(Collector):
    """What is saved of conversations, and what was reused; nothing but the names where `state` is off."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.usage: UsageView | None = None
        """As it was a moment ago."""
        self.blocks: list[BlocksView] = []

    def collect(self) -> Iterator[Metric]:
        tokens = _counter("pagein_prompt_tokens", "Tokens of prompts by where their state came from.", "source")
        restores = _counter("pagein_restores", "Snapshots that were restored, and used.")
        saves = _counter("pagein_snapshot_saves", "Snapshots that were written.")
        misses = _counter("pagein_restore_misses", "Requests for which nothing was restored.", "kind")
        saved = self._desk.snapshots
        for one in saved.reuse() if saved is not None else ():
            for source in ("restored", "cached", "computed"):
                tokens.add_metric([one.model, source], getattr(one, source))
            restores.add_metric([one.model], one.restores)
            saves.add_metric([one.model], one.saves)
            for kind, count in one.misses.items():
                misses.add_metric([one.model, kind], count)
        yield from (tokens, restores, saves, misses)
        for name, text, field in (
            ("pagein_snapshots", "Snapshots on the disk.", "snapshots"),
            ("pagein_snapshot_bytes", "Bytes of the folder of snapshots.", "bytes"),
            ("pagein_snapshot_cap_bytes", "Most that the folder of snapshots may take.", "cap"),
        ):
            family = _gauge(name, text, ())
            _add(family, (), getattr(self.usage, field, None))
            yield family
        blocks = _gauge("pagein_kv_block_bytes", "Bytes of a model's folder of KV blocks.", ("model",))
        for store in self.blocks:
            _add(blocks, (store.model,), store.bytes)
        yield blocks


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=["model", *labels])


def _gauge(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=list(labels))


def _add(family: GaugeMetricFamily, labels: Iterable[str], value: int | None) -> None:
    if value is not None:
        family.add_metric(list(labels), value)
