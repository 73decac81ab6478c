"""Refuse malformed requests with `INVALID_ARGUMENT` and the name of the field.

gRPC alone only reports that deserialising failed, not where.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from backend.config import MESSAGE_LIMIT_BYTES
from backend.errors import InvalidRequestError
from backend.rpc.malformed import MalformedError, find_invalid_utf8, largest_field
from common.rpc.handlers import Context, Continuation, FoundHandler, surround

RECEIVE_LIMIT_BYTES = 2 * MESSAGE_LIMIT_BYTES
"""A message over its limit is read up to this size, to find its largest field."""

Deserializer: TypeAlias = Callable[[bytes], Message]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands in for an unreadable request until its handler refuses it."""

    error: InvalidRequestError


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Raises `InvalidRequestError` for an unreadable or oversized request of some services."""

    def __init__(self, *services: ServiceDescriptor) -> None:
        self._request_types = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in services
            for method in service.methods
        }

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> FoundHandler:
        """Give the services' handlers a deserializer that never fails."""
        handler = await continuation(handler_call_details)
        request_type = self._request_types.get(handler_call_details.method)
        if handler is None or request_type is None or handler.request_deserializer is None:
            return handler
        decode = partial(decode_request, handler.request_deserializer, request_type)
        return surround(handler, _refuse_undecodable, decode)


def decode_request(
    deserialize: Deserializer, request_type: Descriptor, data: bytes
) -> Message | Undecodable:
    """Return the message, or the reason why the bytes are not one."""
    try:
        if len(data) > MESSAGE_LIMIT_BYTES:
            return Undecodable(_oversized(data, request_type))
        return deserialize(data)
    except (DecodeError, MalformedError):
        return Undecodable(_explain(data, request_type))


def _explain(data: bytes, request_type: Descriptor) -> InvalidRequestError:
    try:
        path = find_invalid_utf8(data, request_type)
    except MalformedError:
        path = None
    if path is None:
        return InvalidRequestError("request", f"is not a {request_type.full_name} message")
    return InvalidRequestError(path, "is not valid UTF-8")


def _oversized(data: bytes, request_type: Descriptor) -> InvalidRequestError:
    problem = f"makes a message of {len(data)} bytes; at most {MESSAGE_LIMIT_BYTES} are taken"
    return InvalidRequestError(largest_field(data, request_type) or "request", problem)


@asynccontextmanager
async def _refuse_undecodable(request: object, _context: Context) -> AsyncIterator[None]:
    if isinstance(request, Undecodable):
        raise request.error
    yield
