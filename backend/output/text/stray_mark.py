"""A mark in content that may end it, or be a word of a sentence."""


class StrayMark:
    """Marks held back, with the whitespace after them, until the next text decides.

    Text on the same line makes them text, and so does the end of the reply after other words in
    their line. Alone on a line, and before another part of the reply, they are markup, of which
    only the whitespace remains.

    Attributes:
        marks: The marks held back.
    """

    def __init__(self) -> None:
        self.marks = ""
        self._space = ""
        self._begins_line = False

    @property
    def text(self) -> str:
        """All text held back."""
        return self.marks + self._space

    def add(self, mark: str, *, begins_line: bool) -> None:
        """Hold back a mark.

        Args:
            mark: The mark.
            begins_line: Whether only whitespace precedes it in its line.
        """
        if not self.marks:
            self._begins_line = begins_line
        self.marks = self.text + mark
        self._space = ""

    def feed(self, text: str) -> str:
        """Return the text that may pass: all of it without a mark."""
        if not self.marks:
            return text
        words = text.lstrip(" \t" if self._begins_line else None)
        if not words:
            self._space += text
            return ""
        if self._begins_line and words.startswith("\n"):
            return self.drop() + text
        passing, self.marks, self._space = self.text + text, "", ""
        return passing

    def finish(self) -> str:
        """Return the text that passes at the end of the reply."""
        if self._begins_line:
            return self.drop()
        passing, self.marks, self._space = self.text, "", ""
        return passing

    def drop(self) -> str:
        """Drop the marks, and return the whitespace after them."""
        space, self.marks, self._space = self._space, "", ""
        return space
