"""A tool call inside a fenced code block: a quotation, unless the block never ends.

Code that only mentions a marker is not held up: the wire itself tells, on a ledger of its own,
whether there is a call at all. Only then does the text wait for the end of the block.
"""

from backend.output.tool_calls.wire import WireCursor, WireOutput


class Quotation:
    """The raw text from a marker in a code block up to where it is known what it was."""

    def __init__(self, opener: str, wire: WireCursor) -> None:
        """Begin at a marker.

        Args:
            opener: The marker.
            wire: Reads what follows; it must not count its calls among those of the reply.
        """
        self._opener = opener
        self._wire = wire
        self._raw: list[str] = []
        self.is_call = False

    @property
    def text(self) -> str:
        """All of it, marker included."""
        return self._opener + "".join(self._raw)

    def try_wire(self, text: str) -> WireOutput:
        """Read on, until there is a call or none.

        When there is one, nothing but the text behind the marker comes out, as the rest: it is
        content that waits, to be given to `add`.
        """
        output = self._wire.feed(text)
        self._raw.append(text)
        if not output.deltas:
            return output
        self.is_call = True
        rest = "".join(self._raw)
        self._raw = []
        return WireOutput(rest=rest)

    def add(self, text: str) -> None:
        """Take in content of the code block."""
        self._raw.append(text)
