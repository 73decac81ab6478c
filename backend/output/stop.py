"""Stop strings: texts from the caller that end a reply and are never shown."""

from collections.abc import Iterable

from backend.output.text.automaton import Automaton, Scanner


class StopMatcher:
    """Passes content until a stop string is complete; holds back text that may become one."""

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._scanner = Scanner(Automaton(stop_strings))

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string followed it."""
        scan = self._scanner.feed(text)
        return scan.safe, bool(scan.match)

    def finish(self) -> str:
        """Return the text held back, because the content ends here or is interrupted."""
        return self._scanner.finish()
