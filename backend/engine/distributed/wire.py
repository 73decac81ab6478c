"""Messages between processes: frozen dataclasses as JSON, every value with its type.

Only classes that a codec knows can be made from bytes, so a peer can send nothing but values. No
pickle: it would run what a peer sends.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any, TypeAlias, get_args, get_type_hints

from backend import errors

Value: TypeAlias = Any
"""Whatever may be sent: plain values, containers of them, and what a codec was taught."""

Json: TypeAlias = Any
Pack: TypeAlias = Callable[[Value], Json]
Unpack: TypeAlias = Callable[[Json], Value]

_PLAIN = frozenset({bool, int, float, str, type(None)})
_ERRORS = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.BackendError)
)


class WireError(Exception):
    """Bytes are no message, or a value cannot be sent."""


class Codec:
    """Values to bytes and back; whatever sequence goes in comes out as a tuple."""

    def __init__(self, messages: Sequence[type]) -> None:
        """Know messages, all that their fields may hold, and the errors of the backend.

        Args:
            messages: Dataclasses.
        """
        self._packers: dict[type, tuple[str, Pack]] = {}
        self._unpackers: dict[str, Unpack] = {}
        self.teach(frozenset, self._pack_items, self._unpack_set)
        self.teach(dict, self._pack_pairs, self._unpack_pairs)
        self.teach(PosixPath, str, Path)
        for kind in _ERRORS:
            self._teach_error(kind)
        for kind in dict.fromkeys(kind for message in messages for kind in _held_by(message)):
            if issubclass(kind, Enum):
                self._teach_enum(kind)
            else:
                self._teach_dataclass(kind)

    def teach(self, kind: type, pack: Pack, unpack: Unpack) -> None:
        """Let values of a class be sent, in a way of their own.

        Args:
            kind: The class itself, no subclass of it.
            pack: Returns plain JSON.
            unpack: The reverse of it.
        """
        self._packers[kind] = (kind.__name__, pack)
        self._unpackers[kind.__name__] = unpack

    def encode(self, message: Value) -> bytes:
        """Return the bytes of a message.

        Raises:
            WireError: A value in it is of a class that is not known.
        """
        return json.dumps(self._pack(message), separators=(",", ":")).encode()

    def decode(self, data: bytes) -> Value:
        """Return the message that the bytes hold.

        Raises:
            WireError: They hold none.
        """
        try:
            return self._unpack(json.loads(data))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise WireError(f"a message cannot be read: {error}") from error

    def _pack(self, value: Value) -> Json:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in self._packers:
            name, pack = self._packers[kind]
            return {"is": name, "of": pack(value)}
        if isinstance(value, Mapping):
            return {"is": dict.__name__, "of": self._pack_pairs(value)}
        if isinstance(value, Sequence):
            return self._pack_items(value)
        raise WireError(f"a value of {kind.__name__} cannot be sent")

    def _unpack(self, packed: Json) -> Value:
        if isinstance(packed, list):
            return tuple(map(self._unpack, packed))
        if isinstance(packed, dict):
            return self._unpackers[packed["is"]](packed["of"])
        return packed

    def _teach_dataclass(self, kind: type) -> None:
        names = [field.name for field in fields(kind) if field.init]

        def unpack(values: Json) -> Value:
            return kind(**dict(zip(names, map(self._unpack, values), strict=True)))

        self.teach(kind, lambda value: [self._pack(getattr(value, name)) for name in names], unpack)

    def _teach_enum(self, kind: type[Enum]) -> None:
        self.teach(kind, lambda value: value.name, kind.__getitem__)

    def _teach_error(self, kind: type[errors.BackendError]) -> None:
        """Send an error's class and text; what else it holds stays behind."""
        self.teach(kind, str, lambda text: kind.__new__(kind, text))

    def _pack_items(self, values: Value) -> Json:
        return [self._pack(value) for value in values]

    def _unpack_set(self, values: Json) -> Value:
        return frozenset(map(self._unpack, values))

    def _pack_pairs(self, pairs: Value) -> Json:
        return [[self._pack(key), self._pack(value)] for key, value in pairs.items()]

    def _unpack_pairs(self, pairs: Json) -> Value:
        return {self._unpack(key): self._unpack(value) for key, value in pairs}


def _held_by(hint: Value) -> Iterator[type]:
    """Yield every dataclass and enum that a value of some type may hold."""
    for part in get_args(hint):
        yield from _held_by(part)
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield hint
    elif isinstance(hint, type) and is_dataclass(hint):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from _held_by(inner)
