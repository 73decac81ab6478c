"""The caller of the current work: its address, and whether it is still waiting."""

import threading
from contextvars import ContextVar

_peer: ContextVar[str] = ContextVar("peer", default="")
_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


class AbandonedError(Exception):
    """The caller of this work has gone; no one receives this error."""


def present_peer() -> str:
    """Return the caller's address, empty if there is none."""
    return _peer.get()


def enter_call(peer: str) -> None:
    """Record whose call the current task answers."""
    _peer.set(peer)


def enter_work(abandoned: threading.Event) -> None:
    """Record the event that is set when the caller of the current work has gone."""
    _abandoned.set(abandoned)


def require_caller() -> None:
    """Stop the current work if its caller has gone.

    Raises:
        AbandonedError: The caller was cancelled.
    """
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise AbandonedError
