"""Messages between processes: typed structs in MessagePack, and large arrays as raw buffers.

Only the codec's own structs can be created from bytes, so a peer can send only values.
No pickle: it would run code from the peer.

A frame is a head (two numbers: bytes of the message, count of buffers), the length of each
buffer, the message, and the buffers.
"""

import struct
import threading
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
            messages: A union of tagged structs.
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
