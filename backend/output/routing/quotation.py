"""A tool call where it may be a mere quotation: in a fenced code block, or in a thought.

Text that only mentions a marker is not held up: a reader tells, on a ledger of its own, whether
there is a call at all. Only then does the text wait for the end of the block or of the thought.
"""

from backend.output.readers.reader import Reader, ReaderOutput


class Quotation:
    """The raw text from a marker on, up to where it is known whether it is a quotation."""

    def __init__(self, opener: str, reader: Reader) -> None:
        """Begin at a marker.

        Args:
            opener: The marker, after the whitespace that was held back before it.
            reader: Reads what follows; it must not count its calls among those of the reply.
        """
        self.opener = opener
        self._reader = reader
        self._raw: list[str] = []
        self.is_call = False

    @property
    def text(self) -> str:
        """All of it, marker included."""
        return self.opener + "".join(self._raw)

    def read(self, text: str) -> ReaderOutput:
        """Read on, until there is a call or none.

        If there is a call, all text after the marker comes out as the rest: it waits, to be given
        to `add`.
        """
        output = self._reader.feed(text)
        self._raw.append(text)
        if not output.deltas:
            return output
        self.is_call = True
        rest = "".join(self._raw)
        self._raw = []
        return ReaderOutput(rest=rest)

    def add(self, text: str) -> None:
        """Take in text that waits."""
        self._raw.append(text)
