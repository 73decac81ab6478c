"""A connection that carries messages: a length of four bytes, then so many bytes of JSON."""

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from backend.engine.distributed.wire import Codec, WireError

MAX_MESSAGE_BYTES = 256 * 2**20
_RECEIVE_BYTES = 64 * 1024
_LENGTH = struct.Struct("!I")
# How soon a machine that has vanished without a word is noticed.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# The same, in milliseconds, where bytes to it are on their way: those are sent again for minutes.
_UNANSWERED = {"TCP_USER_TIMEOUT": 25_000}
# Linux tells of a peer that only stopped sending; elsewhere a full hang-up is told unasked.
_HANG_UP = getattr(select, "POLLRDHUP", 0)


class ChannelClosedError(Exception):
    """The peer has gone."""


class Channel:
    """Messages to and from one peer; many threads may send, one receives."""

    def __init__(self, connection: socket.socket, codec: Codec) -> None:
        """Take over a connected socket."""
        self._socket = connection
        self._codec = codec
        self._received = bytearray()
        self._lock = threading.Lock()
        if connection.family != socket.AF_UNIX:
            _tune(connection)

    @property
    def peer_address(self) -> str:
        """The address of the other end; empty inside one machine, or when it has gone."""
        try:
            name = self._socket.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: The peer has gone.
            WireError: The message cannot be sent.
        """
        self.send_packed(self.pack(message))

    def pack(self, message: object) -> bytes:
        """Return a message as `send_packed` takes it.

        Raises:
            WireError: It cannot be sent.
        """
        return self._codec.encode(message)

    def send_packed(self, data: bytes) -> None:
        """Send a message that was encoded before.

        Raises:
            ChannelClosedError: The peer has gone.
        """
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 (whatever was sent)
        """Wait for a message.

        Args:
            timeout_s: For the whole of it; `None` waits for ever.

        Raises:
            ChannelClosedError: The peer has gone, or sends no messages.
            TimeoutError: It has not come; what has come of it stays for the next call.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wait_for(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosedError(f"a message of {length} bytes is no message of ours")
        end = _LENGTH.size + length
        self._wait_for(end, deadline)
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            return self._codec.decode(data)
        except WireError as error:
            raise ChannelClosedError(str(error)) from error

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call back, on a thread of its own, when the peer hangs up; what it sent is left alone."""

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

    def _wait_for(self, count: int, deadline: float | None) -> None:
        """Receive until so many bytes are there."""
        while len(self._received) < count:
            if deadline is not None and not self._has_news(deadline):
                raise TimeoutError
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("the connection was closed")
            self._received += data

    def _has_news(self, deadline: float) -> bool:
        # Unlike `select`, it takes descriptors beyond 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000.0 * max(deadline - time.monotonic(), 0.0)))


class Outbox:
    """Sends on a thread of its own, for those who must not wait for a peer that does not read."""

    def __init__(self, channel: Channel) -> None:
        """Start the thread."""
        self._channel = channel
        self._packed: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="outbox", daemon=True).start()

    def put(self, message: object) -> None:
        """Have a message sent, behind those before it; what a peer that has gone misses is lost.

        Raises:
            WireError: It cannot be sent.
        """
        self._packed.put(self._channel.pack(message))

    def close(self) -> None:
        """End the thread; hanging up ends it too, while it waits for the peer."""
        self._packed.put(None)

    def _work(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            while (data := self._packed.get()) is not None:
                self._channel.send_packed(data)


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (_KEEPALIVE | _UNANSWERED).items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
