"""One opener, several wires: what follows it decides."""

from collections.abc import Mapping

from backend.output.tool_calls.wire import WireContext, WireCursor, WireFactory, WireOutput


class ChoiceCursor:
    """Waits behind the opener until a wire is chosen, and is that wire from then on."""

    def __init__(
        self, context: WireContext, *, choices: Mapping[str, WireFactory], otherwise: WireFactory
    ) -> None:
        """Begin behind an opener.

        Args:
            context: Where the wire begins.
            choices: The text with which a wire begins, whitespace aside.
            otherwise: The wire that begins in any other way.
        """
        self._context = context
        self._choices = choices
        self._otherwise = otherwise
        self._waiting = ""
        self._wire: WireCursor | None = None

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return self._wire.held if self._wire else self._context.opener + self._waiting

    @property
    def is_mid_call(self) -> bool:
        """Whether the chosen wire is in a call; before the choice, a call is to come."""
        return self._wire is None or self._wire.is_mid_call

    def feed(self, text: str) -> WireOutput:
        """Choose, or read on."""
        if self._wire is not None:
            return self._wire.feed(text)
        text = self._waiting + text
        begin = text.lstrip()
        if any(start.startswith(begin) and start != begin for start in self._choices):
            self._waiting = text
            return WireOutput()
        return self._choose(begin).feed(text)

    def finish(self, *, truncated: bool) -> WireOutput:
        """End, with the chosen wire or without one."""
        if self._wire is not None:
            return self._wire.finish(truncated=truncated)
        return WireOutput(rejected="" if truncated else self.held)

    def _choose(self, begin: str) -> WireCursor:
        chosen = (make for start, make in self._choices.items() if begin.startswith(start))
        self._wire = next(chosen, self._otherwise)(self._context)
        return self._wire
