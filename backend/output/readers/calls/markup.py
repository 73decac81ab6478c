"""A text that means nothing."""

from backend.output.readers.reader import ReaderContext, ReaderOutput


class MarkupReader:
    """Takes one text that means nothing, and ends."""

    held = ""
    is_mid_call = False

    def __init__(self, _context: ReaderContext, *, markup: str) -> None:
        self._markup = markup

    def feed(self, text: str) -> ReaderOutput:
        """Give back all that follows the text."""
        return ReaderOutput(rest=text.lstrip().removeprefix(self._markup))

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End, before the text came."""
        return ReaderOutput(rejected="" if truncated else self.held)
