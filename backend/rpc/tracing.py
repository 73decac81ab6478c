"""Spans of calls for OpenTelemetry. Needs the extra `tracing`."""

import inspect
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from common.rpc import Context, Continuation, FoundHandler


def otlp_provider() -> TracerProvider:
    """Return a provider that sends spans to the collector named by the environment."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def tracing_interceptors(provider: TracerProvider) -> Sequence[grpc.aio.ServerInterceptor]:
    """Return interceptors that make a span of each call; place them after authentication."""
    return (aio_server_interceptor(tracer_provider=provider), _GeneratorInterceptor())


class _GeneratorInterceptor(grpc.aio.ServerInterceptor):
    """Presents streams that write to their context as generators, which are instrumented."""

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
