"""Errors of the backend as messages: their class and their text."""

from collections.abc import Mapping

import msgspec

from backend import errors
from backend.errors import BackendError, EngineFailedError

_KINDS: Mapping[str, type[BackendError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BackendError)
}


class Failure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An error of the backend; its other attributes stay where it was raised."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return an error as a message; one that is not the backend's is the engine's failure."""
        if isinstance(error, BackendError):
            # The other process knows only the classes of that one module.
            known = next(kind for kind in type(error).__mro__ if kind in _KINDS.values())
            return cls(known.__name__, str(error))
        return cls(EngineFailedError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> BackendError:
        """Return the error to raise here."""
        kind = _KINDS.get(self.kind, BackendError)
        return kind.__new__(kind, self.text)
