"""Refuse malformed requests with `INVALID_ARGUMENT` and the name of the field.

gRPC alone only reports that deserialising failed, not where.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from backend.config import MESSAGE_LIMIT_BYTES
from backend.errors import InvalidRequestError
from common.rpc import Context, Continuation, FoundHandler, surround

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


class MalformedError(Exception):
    """The bytes are not a protobuf message."""


def fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and payload of each field, in order; `None` without a length prefix.

    Raises:
        MalformedError: A field is cut off, or has an unknown wire type.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            _, end = _varint(data, position)
        elif wire_type == _LENGTH_DELIMITED:
            length, position = _varint(data, position)
            end = position + length
        elif wire_type in _FIXED_SIZES:
            end = position + _FIXED_SIZES[wire_type]
        else:
            raise MalformedError
        if number == 0 or end > len(data):
            raise MalformedError
        yield number, data[position:end] if wire_type == _LENGTH_DELIMITED else None
        position = end


def find_invalid_utf8(data: bytes, descriptor: Descriptor) -> str | None:
    """Return the path of the first text field whose bytes are not UTF-8: `Messages[1].content`.

    Raises:
        MalformedError: The bytes are not a protobuf message at all.
    """
    seen: Counter[int] = Counter()
    for number, payload in fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None or payload is None:
            continue
        path = _find_in_field(payload, field, seen[number])
        if path is not None:
            return path
        seen[number] += 1
    return None


def largest_field(data: bytes, descriptor: Descriptor) -> str | None:
    """Return the name of the field with the most bytes, over all its elements.

    Raises:
        MalformedError: The bytes are not a protobuf message at all.
    """
    sizes: Counter[str] = Counter()
    for number, payload in fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is not None:
            sizes[field.name] += len(payload or b"")
    return max(sizes, key=sizes.__getitem__, default=None)


def _find_in_field(payload: bytes, field: FieldDescriptor, index: int) -> str | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        return None if _is_utf8(payload) else _element(field, index)
    if field.message_type is None:
        return None
    inner = find_invalid_utf8(payload, field.message_type)
    if inner is None:
        return None
    is_map = field.message_type.GetOptions().map_entry
    return field.name if is_map else f"{_element(field, index)}.{inner}"


def _element(field: FieldDescriptor, index: int) -> str:
    return f"{field.name}[{index}]" if field.is_repeated else field.name


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = 0
    for offset, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * offset)
        if byte < 0x80:
            return value, position + offset + 1
    raise MalformedError


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
