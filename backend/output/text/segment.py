"""The text between two markers, whose outer whitespace may belong to the markers."""

from typing import Protocol

# A mark right after one of these, or after a letter or a digit, is no word of a sentence.
SENTENCE_ENDS = frozenset(".!?…。！？>]})|")


class Segment(Protocol):
    """Passes the text of a segment; whitespace held back at its end belongs to the markers."""

    @property
    def is_blank(self) -> bool:
        """Whether only whitespace has passed so far."""

    @property
    def held(self) -> str:
        """Whitespace that passes only if text follows."""

    def feed(self, text: str) -> str:
        """Return the text that may pass."""

    def finish(self) -> str:
        """Return the text that passes if the reply ends here."""


class FirstText:
    """Content at the start of a reply: leading newlines pass only if text follows."""

    def __init__(self) -> None:
        self.is_blank = True
        self._newlines = 0
        self._is_at_start = True

    @property
    def held(self) -> str:
        """Newlines so far."""
        return "\n" * self._newlines

    def feed(self, text: str) -> str:
        """Hold back leading newlines."""
        if not self._is_at_start:
            self.is_blank = self.is_blank and not text.strip()
            return text
        body = text.lstrip("\n")
        self._newlines += len(text) - len(body)
        if not body:
            return ""
        passing = self.held + body
        self._newlines = 0
        self._is_at_start = False
        self.is_blank = not body.strip()
        return passing

    def finish(self) -> str:
        """Pass the newlines: the reply has nothing else."""
        return self.held


class ThoughtText:
    """A thought: newlines at both ends are dropped."""

    def __init__(self) -> None:
        self.is_blank = True
        self._newlines = 0

    @property
    def held(self) -> str:
        """Newlines that may be the last text."""
        return "\n" * self._newlines

    def feed(self, text: str) -> str:
        """Hold back newlines at the end."""
        if self.is_blank:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if not body:
            self._newlines += len(text)
            return ""
        passing = self.held + body
        self.is_blank = False
        self._newlines = len(text) - len(body)
        return passing

    def finish(self) -> str:
        """Drop the text held back."""
        return ""


class TextAfterThought:
    """Content after a thought: its leading newlines are dropped."""

    held = ""

    def __init__(self) -> None:
        self.is_blank = True
        self._is_at_start = True

    def feed(self, text: str) -> str:
        """Pass everything from the first other character on."""
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        self.is_blank = self.is_blank and not text.strip()
        return text

    def finish(self) -> str:
        """Drop the text held back."""
        return ""


class TextAfterCall:
    """Content after a tool call: whitespace passes only if text follows."""

    def __init__(self) -> None:
        self.is_blank = True
        self._whitespace: list[str] = []

    @property
    def held(self) -> str:
        """Whitespace so far."""
        return "".join(self._whitespace)

    def feed(self, text: str) -> str:
        """Hold back leading whitespace."""
        if not self.is_blank:
            return text
        if not text.strip():
            self._whitespace.append(text)
            return ""
        passing = self.held + text
        self.is_blank = False
        self._whitespace.clear()
        return passing

    def finish(self) -> str:
        """Drop the text held back."""
        return ""
