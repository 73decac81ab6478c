"""Limits the length of messages."""

MAX_MESSAGE_BYTES = 2048
"""Trailers may take 8 KiB, and a byte outside printable ASCII takes three."""


def shortened(message: str) -> str:
    """Return a message shortened to at most `MAX_MESSAGE_BYTES` of valid UTF-8."""
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    # The inserted number is never longer than that of all bytes.
    kept = MAX_MESSAGE_BYTES - len(_gap(len(data)))
    head, tail = data[: kept // 2], data[len(data) - kept // 2 :]
    gap = _gap(len(data) - len(head) - len(tail))
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


def _gap(left_out: int) -> str:
    return f" [... {left_out} bytes left out ...] "
