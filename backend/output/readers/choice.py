"""Chooses among dialects with the same opener by the text after it."""

from collections.abc import Mapping

from backend.output.readers.reader import MakeReader, Reader, ReaderContext, ReaderOutput


class ChoiceReader:
    """Waits after the opener until a dialect is chosen, then delegates to its reader."""

    def __init__(
        self, context: ReaderContext, *, choices: Mapping[str, MakeReader], otherwise: MakeReader
    ) -> None:
        """Begin after an opener.

        Args:
            context: The context in which the calls begin.
            choices: Readers by the text that begins their dialect, ignoring whitespace.
            otherwise: Reader of the dialect without such a text.
        """
        self._context = context
        self._choices = choices
        self._otherwise = otherwise
        self._waiting = ""
        self._reader: Reader | None = None

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._reader.held if self._reader else self._context.opener + self._waiting

    @property
    def is_mid_call(self) -> bool:
        """Whether the chosen reader is in a call; before the choice, a call is pending."""
        return self._reader is None or self._reader.is_mid_call

    def feed(self, text: str) -> ReaderOutput:
        """Choose a reader, or let it read."""
        if self._reader is not None:
            return self._reader.feed(text)
        text = self._waiting + text
        begin = text.lstrip()
        if any(start.startswith(begin) and start != begin for start in self._choices):
            self._waiting = text
            return ReaderOutput()
        return self._choose(begin).feed(text)

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End, with or without a chosen reader."""
        if self._reader is not None:
            return self._reader.finish(truncated=truncated)
        return ReaderOutput(rejected="" if truncated else self.held)

    def _choose(self, begin: str) -> Reader:
        chosen = (make for start, make in self._choices.items() if begin.startswith(start))
        self._reader = next(chosen, self._otherwise)(self._context)
        return self._reader
