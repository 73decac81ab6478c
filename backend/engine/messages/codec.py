"""Messages between processes: typed structs in MessagePack, and large arrays as raw buffers.

Only the codec's own structs can be created from bytes, so a peer can send only values.
No pickle: it would run code from the peer.

A frame is a head (two numbers: bytes of the message, count of buffers), the length of each
buffer, the message, and the buffers. A channel carries frames, for threads that may block.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from backend.core.guide import GrammarParts, ReplyGrammar

if TYPE_CHECKING:
    import numpy as np

MAX_FRAME_BYTES = 2**30
MAX_BUFFERS = 4096

_HEAD = struct.Struct("!II")
_LENGTH = struct.Struct("!Q")
_ARRAY = 1

ReadGrammar: TypeAlias = Callable[[GrammarParts], ReplyGrammar]


class WireError(Exception):
    """Bytes are not a message, or a value cannot be sent."""


class Frame(msgspec.Struct, frozen=True):
    """An encoded message."""

    payload: bytes
    buffers: Sequence[bytes | memoryview] = ()

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the frame, in order; buffers are not copied."""
        lengths = b"".join(_LENGTH.pack(memoryview(each).nbytes) for each in self.buffers)
        yield _HEAD.pack(len(self.payload), len(self.buffers)) + lengths + self.payload
        yield from self.buffers


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Sequence[Frame]:
        """Take received bytes, and return the frames that they complete.

        Raises:
            WireError: The bytes are not a frame.
        """
        self._received += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        received = self._received
        if len(received) < _HEAD.size:
            return None
        size, count = _HEAD.unpack_from(received)
        if count or size > MAX_FRAME_BYTES:
            _require_bounds(size, count)
        start = _HEAD.size + count * _LENGTH.size
        if len(received) < start:
            return None
        lengths = [size]
        for index in range(count):
            lengths += _LENGTH.unpack_from(received, _HEAD.size + index * _LENGTH.size)
        end = start + sum(lengths)
        if count:
            _require_bounds(end - start, count)
        if len(received) < end:
            return None
        parts = []
        with memoryview(received) as view:
            for length in lengths:
                parts.append(bytes(view[start : start + length]))
                start += length
        del received[:end]
        return Frame(parts[0], parts[1:])


class Codec:
    """Converts messages of some types to frames and back; safe from any thread."""

    def __init__(self, messages: Any, read_grammar: ReadGrammar | None = None) -> None:  # noqa: ANN401 (a union)
        """Create a codec.

        Args:
            read_grammar: Creates the grammars in messages; `None` refuses them.
        """
        self.read_grammar = read_grammar
        self._lock = threading.Lock()
        self._buffers: list[memoryview] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack)
        self._messages = messages
        self._decoder = msgspec.msgpack.Decoder(messages, dec_hook=self._unpack)

    def encode(self, message: object) -> Frame:
        """Return an encoded message.

        Raises:
            WireError: It contains a value that cannot be sent, or is too large.
        """
        with self._lock:
            try:
                frame = Frame(self._encoder.encode(message), self._buffers)
            except (TypeError, ValueError, OverflowError) as error:
                raise WireError(f"a message cannot be sent: {error}") from error
            finally:
                self._buffers = []
        sizes = [memoryview(part).nbytes for part in (frame.payload, *frame.buffers)]
        _require_bounds(sum(sizes), len(frame.buffers))
        return frame

    def decode(self, frame: Frame) -> Any:  # noqa: ANN401 (any message)
        """Return the message of a frame.

        Raises:
            WireError: The codec does not know it.
        """
        try:
            if not frame.buffers:
                return self._decoder.decode(frame.payload)
            return self._read(frame)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise WireError(f"a message cannot be read: {error}") from error

    def _read(self, frame: Frame) -> Any:  # noqa: ANN401 (any message)
        return msgspec.msgpack.decode(
            frame.payload,
            type=self._messages,
            dec_hook=self._unpack,
            ext_hook=lambda _code, place: _array(place, frame.buffers),
        )

    def _pack(self, value: Any) -> object:  # noqa: ANN401 (any type unknown to msgspec)
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "__array_interface__"):
            return self._set_aside(value)
        if isinstance(value, ReplyGrammar):
            return value.parts
        raise TypeError(f"a value of {type(value).__name__} cannot be sent")

    def _set_aside(self, array: "np.ndarray") -> msgspec.msgpack.Ext:
        """Send the bytes of an array after the message."""
        import numpy as np

        whole = np.ascontiguousarray(array)
        place = (len(self._buffers), whole.dtype.str, array.shape)
        self._buffers.append(whole.reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(place))

    def _unpack(self, kind: Any, value: Any) -> object:  # noqa: ANN401 (a type, and plain values)
        if kind is Path:
            return Path(value)
        if kind is ReplyGrammar and self.read_grammar is not None:
            return self.read_grammar(msgspec.convert(value, GrammarParts))
        raise TypeError(f"a value of {kind.__name__} cannot be read here")


def _require_bounds(size: int, buffers: int) -> None:
    if size > MAX_FRAME_BYTES or buffers > MAX_BUFFERS:
        raise WireError(
            f"{size} bytes with {buffers} arrays are no message: {MAX_FRAME_BYTES} bytes with "
            f"{MAX_BUFFERS} arrays may be one"
        )


_Place: TypeAlias = tuple[int, str, tuple[int, ...]]


def _array(place: memoryview, buffers: Sequence[bytes | memoryview]) -> "np.ndarray":
    import numpy as np

    index, kind, shape = msgspec.msgpack.decode(place, type=_Place)
    if index >= len(buffers) or np.dtype(kind).hasobject:
        raise ValueError("an array is not there")
    return np.frombuffer(buffers[index], np.dtype(kind)).reshape(shape)


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
        self.socket = connection
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
            name = self.socket.getpeername()
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
                    self.socket.sendall(part)
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
            poll.register(self.socket, _HANG_UP)
            poll.poll()
            on_hang_up()

        threading.Thread(target=wait, name="hang-up", daemon=True).start()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _receive_more(self, deadline: float | None) -> None:
        """Wait for bytes."""
        if deadline is not None and not self._has_news(deadline):
            raise TimeoutError
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("the connection was closed")
        self._frames += self._reader.feed(data)

    def _has_news(self, deadline: float) -> bool:
        # Unlike `select`, it takes descriptors beyond 1023.
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000.0 * max(deadline - time.monotonic(), 0.0)))


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a vanished peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (_KEEPALIVE | _UNANSWERED).items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
