"""Prometheus metrics over HTTP, from the engine's snapshot. Needs the extra `metrics`."""

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from backend.core.status import (
    DiskCacheStatus,
    EngineState,
    EngineStatus,
    HitKind,
    PromptCacheStatus,
    RequestPhase,
)
from backend.pipeline.served_model import ServedModel
from common.address import AddressError, bind_problem, split_address


class ObservedEngine(Protocol):
    """The part of an engine that metrics read, from threads of the HTTP server."""

    @property
    def model(self) -> ServedModel | None:
        """The loaded model, or `None`."""

    def status(self) -> EngineStatus:
        """Return a snapshot, at once; from any thread."""


class MetricsServer:
    """Answers scrapes of one engine on its own threads until its context exits."""

    def __init__(self, address: str, engine: ObservedEngine) -> None:
        """Listen.

        Raises:
            AddressError: The address is malformed, not ours, or taken.
        """
        host, port = split_address(address)
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise AddressError(address, bind_problem(error)) from None

    @property
    def port(self) -> int:
        """The port: the requested one, or a free one instead of 0."""
        return self._server.server_port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class EngineCollector:
    """Turns the latest snapshot into metrics at each scrape."""

    def __init__(self, engine: ObservedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one snapshot."""
        status, model = self._engine.status(), self._engine.model
        yield _state(status)
        if model is not None:
            facts = {"name": model.card.name, "type": model.card.model_type}
            yield InfoMetricFamily("mlx_backend_model", "The loaded model", facts)
        yield _memory(status)
        yield from _machine(status)
        yield _requests(status)
        yield CounterMetricFamily(
            "mlx_backend_prompt_tokens_processed",
            "Prompt tokens prefilled, those from the prompt cache not counted",
            status.prompt_tokens,
        )
        yield CounterMetricFamily(
            "mlx_backend_tokens_generated", "Tokens generated", status.generated_tokens
        )
        yield CounterMetricFamily(
            "mlx_backend_tokens_drafted", "Tokens drafted ahead of the model", status.drafted_tokens
        )
        yield CounterMetricFamily(
            "mlx_backend_tokens_accepted",
            "Drafted tokens that the model drew itself",
            status.accepted_tokens,
        )
        yield GaugeMetricFamily(
            "mlx_backend_tokens_per_second", "Tokens generated per second", status.tokens_per_s
        )
        yield GaugeMetricFamily(
            "mlx_backend_turn_seconds", "Seconds in the engine's present turn", status.turn_s
        )
        yield from _processes(status)
        yield from _prompt_cache(status.prompt_cache)
        yield from _disk_cache(status.prompt_cache.disk)


def _processes(status: EngineStatus) -> Iterator[Metric]:
    resident = GaugeMetricFamily(
        "mlx_backend_process_resident_bytes", "Physical memory by process", labels=["role"]
    )
    for process in status.processes:
        resident.add_metric([process.role], process.resident_bytes)
    yield resident
    yield CounterMetricFamily(
        "mlx_backend_engine_restarts", "Engine processes that were replaced", status.restarts
    )
    yield CounterMetricFamily(
        "mlx_backend_engine_lost_seconds", "Time that their replacement took", status.lost_s
    )


def _state(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily(
        "mlx_backend_state", "What the engine is doing: 1 for that state", labels=["state"]
    )
    for state in EngineState:
        family.add_metric([state.value], state is status.state)
    return family


def _memory(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily(
        "mlx_backend_memory_bytes", "Memory by part; parts overlap", labels=["part"]
    )
    for part, size in status.memory_bytes.items():
        family.add_metric([part], size)
    return family


def _machine(status: EngineStatus) -> Iterator[Metric]:
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


def _requests(status: EngineStatus) -> Metric:
    family = GaugeMetricFamily("mlx_backend_requests", "Requests by phase", labels=["phase"])
    phases = [request.phase for request in status.requests]
    for phase in RequestPhase:
        family.add_metric([phase.value], phases.count(phase))
    return family


def _prompt_cache(books: PromptCacheStatus) -> Iterator[Metric]:
    prefix = "mlx_backend_prompt_cache"
    yield GaugeMetricFamily(f"{prefix}_bytes", "Bytes stored", books.bytes)
    yield GaugeMetricFamily(f"{prefix}_budget_bytes", "Bytes at most", books.budget_bytes)
    yield GaugeMetricFamily(f"{prefix}_nodes", "Nodes of the radix tree", books.nodes)
    yield GaugeMetricFamily(f"{prefix}_tokens", "Tokens stored, shared ones once", books.tokens)
    yield CounterMetricFamily(
        f"{prefix}_looked_up_tokens", "Prompt tokens of all requests", books.looked_up_tokens
    )
    yield CounterMetricFamily(
        f"{prefix}_hit_tokens", "Prompt tokens taken from the cache", books.hit_tokens
    )
    lookups = CounterMetricFamily(f"{prefix}_lookups", "Requests by kind of hit", labels=["kind"])
    for kind in HitKind:
        lookups.add_metric([kind.value], books.hits.get(kind, 0))
    yield lookups
    yield CounterMetricFamily(f"{prefix}_evictions", "Nodes evicted", books.evictions)


def _disk_cache(books: DiskCacheStatus) -> Iterator[Metric]:
    prefix = "mlx_backend_prompt_cache_disk"
    yield GaugeMetricFamily(f"{prefix}_bytes", "Bytes of all models' files", books.bytes)
    yield GaugeMetricFamily(f"{prefix}_files", "Files of this model", books.files)
    yield CounterMetricFamily(
        f"{prefix}_read_tokens", "Tokens whose KV was read back", books.read_tokens
    )
    yield CounterMetricFamily(
        f"{prefix}_written_bytes", "Keys, values and states written", books.written_bytes
    )
    yield CounterMetricFamily(f"{prefix}_damaged", "Files set aside as damaged", books.damaged)
    yield CounterMetricFamily(
        f"{prefix}_dropped", "Nodes not written, too many were waiting", books.dropped
    )
