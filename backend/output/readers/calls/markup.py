"""Reads meaningless text."""

from backend.output.readers.reader import ReaderContext, ReaderOutput


class MarkupReader:
    """Consumes one meaningless text, then ends."""

    held = ""
    is_mid_call = False

    def __init__(self, _context: ReaderContext, *, markup: str) -> None:
        self._markup = markup

    def feed(self, text: str) -> ReaderOutput:
        """Return everything after the text as the rest."""
        return ReaderOutput(rest=text.lstrip().removeprefix(self._markup))

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End before the text has arrived."""
        return ReaderOutput(rejected="" if truncated else self.held)
