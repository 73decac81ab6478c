"""What a backend tells of itself, asked in the best way it knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from backend.cli.client import BackendClient, CallError
from backend.pb import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Inspection:
    """One look at a backend.

    Attributes:
        report: What it told.
        is_whole: Whether it knows `Inspect`; one that does not tells state, memory and totals.
    """

    report: pb.InspectReply
    is_whole: bool = True


async def inspect(client: BackendClient) -> Inspection:
    """Return what the backend is doing.

    Raises:
        CallError: It cannot be reached, refuses the token, or tells nothing.
    """
    try:
        return Inspection(await client.inspect())
    except CallError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    return Inspection(await client.counters(), is_whole=False)


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, `None` for a part that is absent.

    Numbers stay numbers, whereas protobuf's own JSON makes text of those with 64 bits.
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
