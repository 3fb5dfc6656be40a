"""Metrics of split models. Labels are configured model names and the names of parts in their plans."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagein.gateway.ports import Desk


class PartsMetrics(Collector):
    """What the daemon knows of parts at the moment of asking; asks no worker."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing but their names where no model is split."""
        both, one = ["model", "part"], ["model"]
        held = GaugeMetricFamily("pagein_part_bytes", "Bytes of a part in memory.", labels=both)
        leases = GaugeMetricFamily("pagein_part_leases", "Calls that use a part.", labels=both)
        loads = CounterMetricFamily("pagein_part_loads", "Loads of a part by this worker.", labels=both)
        gone = CounterMetricFamily("pagein_part_evictions", "Times that a part left this worker.", labels=both)
        owned = GaugeMetricFamily("pagein_parts_owned_bytes", "Bytes of all parts in memory.", labels=one)
        allowed = GaugeMetricFamily("pagein_parts_allowance_bytes", "Bytes that parts may take together.", labels=one)
        for model in self._desk.status().models:
            if model.parts is None:
                continue
            owned.add_metric([model.name], model.parts.owned)
            if model.parts.allowance is not None:
                allowed.add_metric([model.name], model.parts.allowance)
            for part in model.parts.parts:
                names = [model.name, part.name]
                held.add_metric(names, part.bytes)
                leases.add_metric(names, part.leases)
                loads.add_metric(names, part.loads)
                gone.add_metric(names, part.evictions)
        yield from (held, leases, loads, gone, owned, allowed)
