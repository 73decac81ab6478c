"""OpenTelemetry traces, through its own instrumentation of gRPC; needs the extra `tracing`.

Where spans go, and under which name, its libraries read from the `OTEL_*` environment.
"""

import inspect
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from common.handlers import Context, Continuation, FoundHandler


def otlp_provider() -> TracerProvider:
    """Return what sends spans to the collector that the environment names."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def tracing_interceptors(provider: TracerProvider) -> Sequence[grpc.aio.ServerInterceptor]:
    """Return interceptors that make a span of each call; their place is behind the token's."""
    return (aio_server_interceptor(tracer_provider=provider), _GeneratorInterceptor())


class _GeneratorInterceptor(grpc.aio.ServerInterceptor):
    """Shows streams that write to their context as generators, which the instrumentation knows."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        handler = await continuation(handler_call_details)
        behaviour: Any = handler and handler.unary_stream
        if handler is None or behaviour is None or inspect.isasyncgenfunction(behaviour):
            return handler

        async def generator(request: object, context: Context) -> AsyncIterator[object]:
            await behaviour(request, context)
            sent_by_writing: Sequence[object] = ()
            for reply in sent_by_writing:
                yield reply

        return grpc.unary_stream_rpc_method_handler(
            generator, handler.request_deserializer, handler.response_serializer
        )
