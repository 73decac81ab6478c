"""A new number is one row and the line that counts it."""

import asyncio
import urllib.request
from dataclasses import replace

import pytest
from click.testing import CliRunner
from scripted_engine import STATUS, ScriptedEngine, inspector, served, server_of

from backend.cli.app import main
from backend.core import metric_table
from backend.core.engine_status import EngineStatus
from backend.core.metric_table import Metric, MetricKind, added
from backend.engine.messages.codec import Codec
from backend.engine.messages.protocol import News, Snapshot
from backend.engine.rows.pacing import Counters
from backend.engine.supervision.supervisor import Losses
from backend.pb import backend_pb2 as pb
from backend.rpc.metrics import MetricsServer

TOYS = Metric(kind=MetricKind.COUNTER, help="Toys counted", words="toys")
COLOURS = Metric(
    kind=MetricKind.COUNTER, help="Toys by colour", label="colour", label_values=("red", "blue")
)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(metric_table.METRICS, "toys", TOYS)
    monkeypatch.setitem(metric_table.METRICS, "prompt_cache.toys", COLOURS)


def engine_process(toys):
    """Return the snapshot of an engine process that has counted toys, as the server gets it."""
    counters = Counters()
    counters.add("toys", toys)
    counters.add("prompt_cache.toys.blue", 10 * toys)
    codec = Codec(News)
    sent = Snapshot(EngineStatus(metrics=counters.values))
    return codec.decode(codec.encode(sent)).status


@pytest.fixture
def engine(rows):  # noqa: ARG001 (the table has them)
    """An engine whose first process was lost after three toys; the second has counted four."""
    losses = Losses()
    losses.count(engine_process(3))
    total = losses.added_to(engine_process(4)).metrics
    engine = ScriptedEngine()
    engine.status = lambda: replace(STATUS, metrics=added([STATUS.metrics, total]))
    return engine


def test_prometheus_reads_it(engine):
    with MetricsServer("127.0.0.1:0", engine) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
    assert "# HELP mlx_backend_toys_total Toys counted\n" in text
    assert "mlx_backend_toys_total 7.0\n" in text
    assert 'mlx_backend_prompt_cache_toys_total{colour="blue"} 70.0\n' in text
    assert 'mlx_backend_prompt_cache_toys_total{colour="red"} 0.0\n' in text


async def test_inspect_tells_it(engine):
    async with served(engine) as channel:
        reply = await inspector(channel).Inspect(pb.InspectRequest())
    told = {metric.name: metric.value for metric in reply.metrics}
    assert told["toys"] == 7
    assert (told["prompt_cache.toys.blue"], told["prompt_cache.toys.red"]) == (70, 0)
    assert reply.prompt_cache.nodes == 3


async def test_the_status_command_shows_it(engine):
    server = server_of(engine)
    arguments = ["status", "--addr", await server.start()]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "150"}).invoke, main, arguments)
    await server.stop()
    assert "13 tokens generated · 1.5 tokens/s · 7 toys" in result.output


def test_a_number_without_a_row_cannot_be_counted():
    with pytest.raises(KeyError):
        Counters().add("dolls")
