"""A tool call that may be just a quotation: in a fenced code block, or in a thought.

Text that only mentions a marker is not delayed: a reader with its own ledger tells whether there
is a call at all. Only then does the text wait for the end of the block or of the thought.
"""

from backend.output.readers.reader import Reader, ReaderOutput


class Quotation:
    """The raw text from a marker on, until it is known whether it is a quotation."""

    def __init__(self, opener: str, reader: Reader) -> None:
        """Begin at a marker.

        Args:
            opener: The marker, with the whitespace that was held back before it.
            reader: Reads the following text; must not count its calls as the reply's.
        """
        self.opener = opener
        self._reader = reader
        self._raw: list[str] = []
        self.is_call = False

    @property
    def text(self) -> str:
        """The whole text, including the marker."""
        return self.opener + "".join(self._raw)

    def read(self, text: str) -> ReaderOutput:
        """Read more text, until there is or cannot be a call.

        If there is a call, all text after the marker is returned as the rest: it waits, and must be
        passed to `add`.
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
        """Add waiting text."""
        self._raw.append(text)
