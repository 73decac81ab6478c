"""`ModelOptions.EnvVars`: environment variables of the engine that a load starts."""

import re
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from backend.config import MAX_ENVIRONMENT_BYTES
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def environment_of(entries: Iterable[bytes]) -> tuple[tuple[str, str], ...]:
    """Return names and values, sorted by name; a later entry wins.

    Args:
        entries: Entries of a `map<string, string>` on the wire, or texts of the form NAME=value.

    Raises:
        InvalidRequestError: An entry is neither, a name cannot be one, or there are too many.
    """
    found = {}
    for index, entry in enumerate(entries):
        name, value = _map_entry(entry) or _assignment(f"EnvVars[{index}]", entry)
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"EnvVars[{index}]", f"{name!r} is not a name of a variable")
        if "\0" in value:
            raise InvalidRequestError("EnvVars", f"the value of {name} contains a zero byte")
        found[name] = value
    size = sum(len(name) + len(value) for name, value in found.items())
    if size > MAX_ENVIRONMENT_BYTES:
        problem = f"holds {size} characters, more than {MAX_ENVIRONMENT_BYTES}"
        raise InvalidRequestError("EnvVars", problem)
    return tuple(sorted(found.items()))


def _map_entry(entry: bytes) -> tuple[str, str] | None:
    """Return the key and the value of a map's entry; `None` for other bytes."""
    try:
        pair = pb.ModelOptions.EnvVar.FromString(entry)
    except DecodeError:
        return None
    return (pair.key, pair.value) if pair.key and pair.ByteSize() == len(entry) else None


def _assignment(field: str, entry: bytes) -> tuple[str, str]:
    try:
        name, equals, value = entry.decode().partition("=")
    except UnicodeDecodeError:
        raise InvalidRequestError(field, "is neither UTF-8 nor an entry of a map") from None
    if not equals:
        raise InvalidRequestError(field, f"{name[:64]!r} is not of the form NAME=value")
    return name, value
