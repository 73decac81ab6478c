"""Decode requests so that no caller holds up another, and refuse unreadable ones by their field.

gRPC decodes on the event loop, and reports only that it failed, not where. The time to decode
follows from the number of fields, not of bytes. So they are counted first: a request with many is
decoded on a thread, one with too many is refused.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from backend.config import INLINE_BYTES, INLINE_FIELDS, MAX_MESSAGE_FIELDS, MESSAGE_LIMIT_BYTES
from backend.errors import InvalidRequestError
from backend.pipeline import worker_pool
from common.rpc import (
    Context,
    Continuation,
    FoundHandler,
    enter_request,
    require_caller,
    surround,
)

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
# The marks around a group have no payload: its fields count as those of its message.
_FIXED_SIZES = {_FIXED64: 8, 3: 0, 4: 0, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# By the time that protobuf takes for them: a map is a hash table, packed numbers are an array.
MAP_ENTRY_FIELDS, PACKED_PER_FIELD = 32, 16
_CONTINUED_BYTES = bytes(range(0x80, 0x100))
_SLICE_BYTES = 2**16


class MalformedError(Exception):
    """The bytes are not a protobuf message."""


class Span(NamedTuple):
    """A field's number, its wire type, and the place of its payload in the bytes."""

    number: int
    wire_type: int
    start: int
    end: int


def spans(data: bytes, start: int, end: int) -> Iterator[Span]:
    """Yield the fields of a message that is a part of some bytes, in order.

    Raises:
        MalformedError: A field is cut off, or has an unknown wire type.
    """
    while start < end:
        key, start = _varint(data, start, end)
        wire_type = key & 7
        stop = start
        if wire_type == _LENGTH_DELIMITED:
            length, start = _varint(data, start, end)
            stop = start + length
        elif wire_type == _VARINT:
            _, stop = _varint(data, start, end)
        else:
            stop += _FIXED_SIZES.get(wire_type, end)
        if stop > end or key < 8:
            raise MalformedError
        yield Span(key >> 3, wire_type, start, stop)
        start = stop


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    if position < end and data[position] < 0x80:
        return data[position], position + 1
    value = 0
    for shift, byte in enumerate(data[position : min(end, position + _MAX_VARINT_BYTES)]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedError


class _Field(NamedTuple):
    """How a field of a message is read."""

    name: str
    message: Descriptor | None
    is_map: bool
    is_text: bool
    is_repeated: bool
    is_number: bool
    number_bytes: int
    """The size of a packed number; 0 if it varies."""


_TYPES = FieldDescriptor
_TEXTS = {_TYPES.TYPE_STRING, _TYPES.TYPE_BYTES}
_NUMBER_BYTES = dict.fromkeys(
    (_TYPES.TYPE_FLOAT, _TYPES.TYPE_FIXED32, _TYPES.TYPE_SFIXED32), 4
) | dict.fromkeys((_TYPES.TYPE_DOUBLE, _TYPES.TYPE_FIXED64, _TYPES.TYPE_SFIXED64), 8)


@cache
def _known(descriptor: Descriptor) -> dict[int, _Field]:
    """Return the fields of a message by number."""
    return {field.number: _read_field(field) for field in descriptor.fields}


def _read_field(field: FieldDescriptor) -> _Field:
    inner = field.message_type
    return _Field(
        name=field.name,
        message=inner,
        is_map=inner is not None and inner.GetOptions().map_entry,
        is_text=field.type == _TYPES.TYPE_STRING,
        is_repeated=field.is_repeated,
        is_number=inner is None and field.type not in _TEXTS,
        number_bytes=_NUMBER_BYTES.get(field.type, 0),
    )


def count_fields(data: bytes, descriptor: Descriptor, limit: int) -> Counter[str]:
    """Count a message's fields, and those inside of them for the outermost one.

    An entry of a map counts more than another field, and a packed number less. Unknown fields
    have the name `request`. Counting ends soon after the limit, and where the message is malformed.
    """
    counts: Counter[str] = Counter()
    names = _names(data, 0, len(data), descriptor, "")
    with suppress(MalformedError):
        while counts.total() <= limit:
            before = counts.total()
            counts.update(islice(names, INLINE_FIELDS))
            if counts.total() == before:
                break
            require_caller()
    return counts


def _names(data: bytes, start: int, end: int, descriptor: Descriptor, outer: str) -> Iterator[str]:
    """Yield the name of the outermost field for each field, however deep it is."""
    known = _known(descriptor)
    for span in spans(data, start, end):
        field = known.get(span.number)
        name = outer or (field.name if field is not None else "request")
        yield name
        if field is None or span.wire_type != _LENGTH_DELIMITED:
            continue
        if field.message is not None:
            yield from repeat(name, MAP_ENTRY_FIELDS * field.is_map)
            # In a group, protobuf does not read it.
            with suppress(MalformedError):
                yield from _names(data, span.start, span.end, field.message, name)
        elif field.is_number:
            yield from _packed(data, span, field.number_bytes, name)


def _packed(data: bytes, span: Span, number_bytes: int, name: str) -> Iterator[str]:
    for start in range(span.start, span.end, _SLICE_BYTES):
        numbers = data[start : min(span.end, start + _SLICE_BYTES)]
        # The last byte of each number of varying size.
        ends = numbers if number_bytes else numbers.translate(None, _CONTINUED_BYTES)
        yield from repeat(name, len(ends) // (number_bytes or 1) // PACKED_PER_FIELD)


def find_invalid_utf8(data: bytes, descriptor: Descriptor) -> str | None:
    """Return the path of the first text field whose bytes are not UTF-8: `Messages[1].content`.

    Raises:
        MalformedError: The bytes are not a protobuf message at all.
    """
    return _find_invalid(data, 0, len(data), descriptor)


def _find_invalid(data: bytes, start: int, end: int, descriptor: Descriptor) -> str | None:
    known = _known(descriptor)
    seen: Counter[int] = Counter()
    for span in spans(data, start, end):
        field = known.get(span.number)
        if field is None or span.wire_type != _LENGTH_DELIMITED:
            continue
        path = _find_in_field(data, span, field, seen[span.number])
        if path is not None:
            return path
        seen[span.number] += 1
    return None


def largest_field(data: bytes, descriptor: Descriptor) -> str | None:
    """Return the name of the field with the most bytes, over all its elements.

    Raises:
        MalformedError: The bytes are not a protobuf message at all.
    """
    known = _known(descriptor)
    sizes: Counter[str] = Counter()
    for span in spans(data, 0, len(data)):
        field = known.get(span.number)
        if field is not None:
            sizes[field.name] += span.end - span.start
    return max(sizes, key=sizes.__getitem__, default=None)


def _find_in_field(data: bytes, span: Span, field: _Field, index: int) -> str | None:
    element = f"{field.name}[{index}]" if field.is_repeated else field.name
    if field.is_text:
        return None if _is_utf8(data[span.start : span.end]) else element
    if field.message is None:
        return None
    inner = _find_invalid(data, span.start, span.end, field.message)
    if inner is None:
        return None
    return field.name if field.is_map else f"{element}.{inner}"


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


RECEIVE_LIMIT_BYTES = 2 * MESSAGE_LIMIT_BYTES
"""A message over its limit is read up to this size, to find its largest field."""

Deserializer: TypeAlias = Callable[[bytes], Message]


@dataclass(eq=False, slots=True)
class Undecoded:
    """Stands in for a request that is not decoded on the event loop."""

    _decode: Deserializer
    _data: bytes

    async def decode(self) -> Message:
        """Decode it on a thread, once.

        Raises:
            InvalidRequestError: It is malformed, too large, or has too many fields.
            OverloadedError: Too many requests wait for that.
        """
        # gRPC keeps this object as long as the call.
        data, self._data = self._data, b""
        return await worker_pool.run_decoding(partial(self._decode, data), size_bytes=len(data))


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Has the requests of some services decoded where they cost no one else time.

    A request that cannot be decoded raises `InvalidRequestError` in its call.
    """

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
        decode = partial(decode_inline, handler.request_deserializer, request_type)
        return surround(handler, _decoded, decode)


def decode_inline(
    deserialize: Deserializer, request_type: Descriptor, data: bytes
) -> Message | Undecoded:
    """Return a message of few fields; for another, a stand-in to decode or explain on a thread."""
    enter_request(len(data))
    if _has_few_fields(data, request_type):
        with suppress(DecodeError):
            return deserialize(data)
    return Undecoded(partial(decode_request, deserialize, request_type), data)


def _has_few_fields(data: bytes, request_type: Descriptor) -> bool:
    # Whatever its fields, it is decoded in 5 ms; to count 10,000 messages takes ten times longer.
    if len(data) <= INLINE_BYTES:
        return True
    if len(data) > MESSAGE_LIMIT_BYTES:
        return False
    return count_fields(data, request_type, INLINE_FIELDS).total() <= INLINE_FIELDS


def decode_request(deserialize: Deserializer, request_type: Descriptor, data: bytes) -> Message:
    """Return the message.

    Raises:
        InvalidRequestError: It is malformed, too large, or has too many fields.
    """
    counts = count_fields(data, request_type, MAX_MESSAGE_FIELDS)
    if counts.total() > MAX_MESSAGE_FIELDS:
        [(name, _)] = counts.most_common(1)
        raise InvalidRequestError(name, _TOO_MANY)
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise _oversized(data, request_type)
    try:
        return deserialize(data)
    except DecodeError:
        raise _explain(data, request_type) from None


_TOO_MANY = (
    f"makes a message of more than {MAX_MESSAGE_FIELDS} fields, the limit; an entry of a map counts"
    f" as {MAP_ENTRY_FIELDS}, {PACKED_PER_FIELD} packed numbers as one"
)


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
    try:
        name = largest_field(data, request_type)
    except MalformedError:
        return _explain(data, request_type)
    return InvalidRequestError(name or "request", problem)


@asynccontextmanager
async def _decoded(request: Any, _context: Context) -> AsyncIterator[Any]:  # noqa: ANN401 (of any method)
    if isinstance(request, Undecoded):
        request = await request.decode()
    elif isinstance(request, AsyncIterator):
        request = _each_decoded(request)
    yield request


async def _each_decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield await request.decode() if isinstance(request, Undecoded) else request
