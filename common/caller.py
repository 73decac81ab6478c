"""The caller of the work at hand: who it is, and whether it still waits."""

import threading
from contextvars import ContextVar

_peer: ContextVar[str] = ContextVar("peer", default="")
_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


class AbandonedError(Exception):
    """The caller of this work has gone; the error reaches no one."""


def present_peer() -> str:
    """Return the address of the caller, empty where there is none."""
    return _peer.get()


def enter_call(peer: str) -> None:
    """Note whose call the present task answers."""
    _peer.set(peer)


def enter_work(abandoned: threading.Event) -> None:
    """Note the event that is set when the caller of the present work has gone."""
    _abandoned.set(abandoned)


def require_caller() -> None:
    """End work whose caller has gone.

    Raises:
        AbandonedError: The caller was cancelled.
    """
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise AbandonedError
