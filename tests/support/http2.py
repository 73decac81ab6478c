"""Frames of HTTP/2 by hand: no client sends them, and gRPC has to read them."""

DATA, HEADERS, RESET, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
# A header: the latest one that both sides remember.
REMEMBERED = b"\xbe"


def frame(kind, flags, stream, payload):
    """Return a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


# The first bytes of a client.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")


def _number(value):
    """Return a length as HPACK writes it, in seven bits and more."""
    if value < 127:
        return bytes([value])
    low, high = (value - 127) % 128, (value - 127) // 128
    return bytes([127, low | 128, high]) if high else bytes([127, low])


def field(name, value, *, remembers=False):
    """Return a header of a request, as HPACK writes one without tables."""
    first = b"\x40" if remembers else b"\0"
    return first + _number(len(name)) + name + _number(len(value)) + value


def opened(number, method, more=b""):
    """Return the frame that begins a call."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": method.encode()}
    fields |= {b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc"}
    block = b"".join(field(*each) for each in fields.items()) + more
    return frame(HEADERS, END_HEADERS, number, block)


def read_frames(connection, kind, count):
    """Read frames until so many of them were of a kind."""
    with connection.makefile("rb") as reader:
        while count:
            head = reader.read(9)
            assert head
            reader.read(int.from_bytes(head[:3], "big"))
            count -= head[3] == kind
