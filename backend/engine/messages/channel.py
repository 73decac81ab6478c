"""A connection for messages, for threads that may block."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from backend.engine.messages.codec import Codec, Frame, FrameReader, WireError

_RECEIVE_BYTES = 256 * 1024
# How soon a vanished machine is noticed.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# The same, in milliseconds, with unacknowledged bytes, which are resent for minutes.
_UNANSWERED = {"TCP_USER_TIMEOUT": 25_000}
# Linux reports a peer that only stopped sending; elsewhere a full hang-up needs no flag.
_HANG_UP = getattr(select, "POLLRDHUP", 0)


class ChannelClosedError(Exception):
    """The peer is gone."""


class Channel:
    """Messages to and from one peer; many threads may send, one receives."""

    def __init__(self, connection: socket.socket, codec: Codec) -> None:
        """Take over a connected socket."""
        self._socket = connection
        self._codec = codec
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._lock = threading.Lock()
        if connection.family != socket.AF_UNIX:
            _tune(connection)

    @property
    def peer_address(self) -> str:
        """The address of the other end; empty inside one machine, or if it is gone."""
        try:
            name = self._socket.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: The peer is gone.
            WireError: The message cannot be sent.
        """
        self.send_frame(self._codec.encode(message))

    def send_frame(self, frame: Frame) -> None:
        """Send an encoded message.

        Raises:
            ChannelClosedError: The peer is gone.
        """
        try:
            with self._lock:
                for part in frame.parts():
                    self._socket.sendall(part)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 (any message)
        """Wait for a whole message, up to the timeout; `None` waits forever.

        Raises:
            ChannelClosedError: The peer is gone, or sends no messages.
            TimeoutError: It is incomplete; the received part stays for the next call.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._frames:
                self._receive_more(deadline)
            return self._codec.decode(self._frames.popleft())
        except WireError as error:
            raise ChannelClosedError(str(error)) from error

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call back, on a separate thread, when the peer hangs up; its data is left alone."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._socket, _HANG_UP)
            poll.poll()
            on_hang_up()

        threading.Thread(target=wait, name="hang-up", daemon=True).start()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_more(self, deadline: float | None) -> None:
        """Wait for bytes."""
        if deadline is not None and not self._has_news(deadline):
            raise TimeoutError
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("the connection was closed")
        self._frames += self._reader.feed(data)

    def _has_news(self, deadline: float) -> bool:
        # Unlike `select`, it takes descriptors beyond 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000.0 * max(deadline - time.monotonic(), 0.0)))


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a vanished peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (_KEEPALIVE | _UNANSWERED).items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
