"""A backend's entry in the machine's memory ledger."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MAX_NAME_CHARS = 256
Bytes = Annotated[int, Meta(ge=0, le=2**56)]


class Entry(Struct, frozen=True, kw_only=True):
    """A backend in the ledger; sizes are in bytes.

    Attributes:
        process_id: Of its engine.
        device: The memory that it shares: one GPU's, or the machine's.
        held: By weights and media, while the model is loaded.
        reserved: By running requests.
        wanted: Additionally, by requests that wait or grow.
        cached: By the part of the prompt cache that no running request uses.
        budget: The limit for requests and prompt cache.
        least: The smallest useful budget.
        wish: The budget without other backends.
        is_busy: Whether there are requests.
    """

    process_id: Bytes
    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    device: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    held: Bytes = 0
    reserved: Bytes = 0
    wanted: Bytes = 0
    cached: Bytes = 0
    budget: Bytes = 0
    least: Bytes = 0
    wish: Bytes = 0
    is_busy: bool = False


class DamagedEntryError(Exception):
    """A file of the ledger does not contain an entry."""


_decoder = msgspec.json.Decoder(Entry)


def encoded(entry: Entry) -> bytes:
    """Return an entry as one line of JSON."""
    return msgspec.json.encode(entry) + b"\n"


def decoded(data: bytes) -> Entry:
    """Return the entry in a file.

    Raises:
        DamagedEntryError: It contains something else.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedEntryError(str(error)) from None
