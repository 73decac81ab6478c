"""Spans of calls, where OpenTelemetry's packages are installed."""

import grpc
import grpc.aio
import pytest
from scripted_engine import ScriptedEngine, server_of, steps, stub
from serving import code_of

from backend.pb import backend_pb2 as pb

pytest.importorskip("opentelemetry.instrumentation.grpc")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backend.rpc.tracing import tracing_interceptors

HELLO = pb.PredictOptions(Prompt="hi")


async def spans_of(make_calls):
    """Serve with a tracer, make calls, and return the names and statuses of their spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = server_of(ScriptedEngine(steps("ok")), tracing=tracing_interceptors(provider))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        await make_calls(stub(channel))
    await server.stop()
    spans = exporter.get_finished_spans()
    return {span.name: span.attributes["rpc.grpc.status_code"] for span in spans}


async def test_each_call_is_a_span_and_a_stream_still_streams():
    async def make_calls(client):
        assert (await client.Predict(HELLO)).message == b"ok"
        replies = [reply.message async for reply in client.PredictStream(HELLO)]
        assert b"".join(replies) == b"ok"

    spans = await spans_of(make_calls)
    assert spans == {"/backend.Backend/Predict": 0, "/backend.Backend/PredictStream": 0}


async def test_a_refused_call_is_a_span_with_its_status():
    async def make_calls(client):
        code, _ = await code_of(client.Predict(pb.PredictOptions(Prompt="hi", TopP=-1.0)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    code, _ = grpc.StatusCode.INVALID_ARGUMENT.value
    assert await spans_of(make_calls) == {"/backend.Backend/Predict": code}
