"""Finds the strings of a JSON value between tags: a tag in one of them is text."""

from backend.output.readers.values.json_scanner import JsonScanner, JsonState


class JsonStrings:
    """Follows an object or array, and remembers the first place in a string where a tag begins.

    If the value turns out not to be JSON, a quote may be missing, and it may have ended there.
    """

    def __init__(self) -> None:
        """Begin before a value."""
        self._scanner = JsonScanner()
        self._first = ""
        self._read = 0
        self._first_tag: int | None = None

    @property
    def read(self) -> int:
        """Number of characters read but not taken."""
        return self._read

    @property
    def sure(self) -> int:
        """Number of characters read but not taken that belong to the value for certain."""
        return self._read if self._first_tag is None else self._first_tag

    @property
    def is_broken(self) -> bool:
        """Whether the value is not an object or array in JSON."""
        return self._first not in ("", "{", "[") or self._scanner.state is JsonState.MALFORMED

    def quotes(self, text: str) -> bool:
        """Read more of the value; return whether a tag after it is in a string."""
        self._first = self._first or text.lstrip()[:1]
        self._scanner.feed(text)
        self._read += len(text)
        is_quoted = self._scanner.is_in_string and not self.is_broken
        if is_quoted and self._first_tag is None:
            self._first_tag = self._read
        return is_quoted

    def read_on(self, text: str) -> None:
        """Read more of the value, up to where no tag begins."""
        first_tag = self._first_tag
        self.quotes(text)
        self._first_tag = first_tag

    def take(self, chars: int) -> None:
        """Count characters as taken."""
        self._read -= chars
        if self._first_tag is not None:
            self._first_tag -= chars
