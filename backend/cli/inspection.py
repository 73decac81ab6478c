"""A backend's report on itself, by the best call that it supports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from backend.cli.client import BackendClient, CallError
from backend.pb import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Inspection:
    """One snapshot of a backend.

    Attributes:
        report: Its report.
        is_whole: Whether it has `Inspect`; others report only state, memory and totals.
    """

    report: pb.InspectReply
    is_whole: bool = True


async def inspect(client: BackendClient) -> Inspection:
    """Return a snapshot of the backend.

    Raises:
        CallError: It cannot be reached, refuses the token, or returns nothing.
    """
    try:
        return Inspection(await client.inspect())
    except CallError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    return Inspection(await client.counters(), is_whole=False)


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, `None` for a part that is absent.

    Numbers stay numbers, whereas protobuf's own JSON turns 64-bit ones into text.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.enum_type is not None:
            values[field.name] = field.enum_type.values_by_number[value].name
        elif field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        else:
            values[field.name] = _plain_value(value)
    return values


def _plain_value(value: object) -> object:
    match value:
        case Message():
            return plain(value)
        case Mapping():
            return dict(value)
        case str():
            return value
        case Sequence():
            return [_plain_value(element) for element in value]
        case _:
            return value
