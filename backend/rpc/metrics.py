"""Prometheus metrics over HTTP, from the engine's snapshot. Needs the extra `metrics`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family

from backend.core.engine_status import EngineState, EngineStatus, RequestPhase
from backend.core.metric_table import METRICS, Metric, MetricKind, Values
from backend.pipeline.served_model import ServedEngine
from common.web import HttpServer


class MetricsServer(HttpServer):
    """Answers scrapes of one engine."""

    def __init__(self, address: str, engine: ServedEngine) -> None:
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        super().__init__(address, make_wsgi_app(registry), "metrics")


@dataclass(frozen=True, slots=True)
class EngineCollector:
    """Turns the latest snapshot into metrics at each scrape."""

    engine: ServedEngine

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of one snapshot."""
        status, model = self.engine.status(), self.engine.model
        states = {state.value: state is status.state for state in EngineState}
        yield _gauge("state", "What the engine is doing: 1 for that state", "state", states)
        if model is not None:
            facts = {"name": model.card.name, "type": model.card.model_type}
            yield InfoMetricFamily("mlx_backend_model", "The loaded model", facts)
        memory = status.memory_bytes
        yield _gauge("memory_bytes", "Memory by part; parts overlap", "part", memory)
        yield from _machine(status)
        found = Counter(request.phase for request in status.requests)
        phases = {phase.value: found[phase] for phase in RequestPhase}
        yield _gauge("requests", "Requests by phase", "phase", phases)
        resident = {process.role: process.resident_bytes for process in status.processes}
        yield _gauge("process_resident_bytes", "Physical memory by process", "role", resident)
        for name, metric in METRICS.items():
            yield _family(name, metric, status.metrics)


def _gauge(name: str, words: str, label: str, values: Values) -> Family:
    """Return a number for each value of a label."""
    family = GaugeMetricFamily(f"mlx_backend_{name}", words, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _family(name: str, metric: Metric, values: Values) -> Family:
    exported = f"mlx_backend_{metric.exported or name.replace('.', '_')}"
    labels = [metric.label] if metric.label else []
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(exported, metric.help, labels=labels)
    for key, label in metric.keys(name).items():
        family.add_metric([label] if labels else [], values.get(key, 0))
    return family


def _machine(status: EngineStatus) -> Iterator[Family]:
    if (machine := status.machine) is None:
        return
    prefix = "mlx_backend_machine"
    yield GaugeMetricFamily(
        f"{prefix}_usable_bytes", "What all backends may take together", machine.usable_bytes
    )
    yield GaugeMetricFamily(
        f"{prefix}_claimed_bytes", "What their weights and budgets take", machine.claimed_bytes
    )
    yield GaugeMetricFamily(f"{prefix}_backends", "Backends of it", len(machine.backends))
