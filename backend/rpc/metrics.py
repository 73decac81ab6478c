"""Prometheus metrics over HTTP, from the engine's snapshot. Needs the extra `metrics`."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family

from backend.core.engine_status import EngineState, EngineStatus, RequestPhase
from backend.core.metric_table import METRICS, Metric, MetricKind, Values
from backend.pipeline.served_model import ServedModel
from common.web import HttpServer


class ObservedEngine(Protocol):
    """The part of an engine that metrics read, from threads of the HTTP server."""

    @property
    def model(self) -> ServedModel | None:
        """The loaded model, or `None`."""

    def status(self) -> EngineStatus:
        """Return a snapshot, at once; from any thread."""


class MetricsServer(HttpServer):
    """Answers scrapes of one engine."""

    def __init__(self, address: str, engine: ObservedEngine) -> None:
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        super().__init__(address, make_wsgi_app(registry), "metrics")


class EngineCollector:
    """Turns the latest snapshot into metrics at each scrape."""

    def __init__(self, engine: ObservedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of one snapshot."""
        status, model = self._engine.status(), self._engine.model
        yield _state(status)
        if model is not None:
            facts = {"name": model.card.name, "type": model.card.model_type}
            yield InfoMetricFamily("mlx_backend_model", "The loaded model", facts)
        yield _memory(status)
        yield from _machine(status)
        yield _requests(status)
        yield _processes(status)
        for name, metric in METRICS.items():
            yield _family(name, metric, status.metrics)


def _family(name: str, metric: Metric, values: Values) -> Family:
    exported = f"mlx_backend_{metric.exported or name.replace('.', '_')}"
    labels = [metric.label] if metric.label else []
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(exported, metric.help, labels=labels)
    for key, label in metric.keys(name).items():
        family.add_metric([label] if labels else [], values.get(key, 0))
    return family


def _processes(status: EngineStatus) -> Family:
    resident = GaugeMetricFamily(
        "mlx_backend_process_resident_bytes", "Physical memory by process", labels=["role"]
    )
    for process in status.processes:
        resident.add_metric([process.role], process.resident_bytes)
    return resident


def _state(status: EngineStatus) -> Family:
    family = GaugeMetricFamily(
        "mlx_backend_state", "What the engine is doing: 1 for that state", labels=["state"]
    )
    for state in EngineState:
        family.add_metric([state.value], state is status.state)
    return family


def _memory(status: EngineStatus) -> Family:
    family = GaugeMetricFamily(
        "mlx_backend_memory_bytes", "Memory by part; parts overlap", labels=["part"]
    )
    for part, size in status.memory_bytes.items():
        family.add_metric([part], size)
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


def _requests(status: EngineStatus) -> Family:
    family = GaugeMetricFamily("mlx_backend_requests", "Requests by phase", labels=["phase"])
    phases = [request.phase for request in status.requests]
    for phase in RequestPhase:
        family.add_metric([phase.value], phases.count(phase))
    return family
