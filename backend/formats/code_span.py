"""Tracks Markdown code in content, to tell quoted markers from real ones."""

import re

_PIECE = re.compile(r"`+|~+|\n|[^`~\n]+")
_MIN_FENCE = 3
_MAX_INDENT = 3


class CodeTracker:
    """Tells whether the content so far ends inside a fenced block or inline code.

    A subset of Markdown's rules is enough: a fence starts a line and is closed by one at least
    as long; inline code is closed by the same number of backticks. The end of the line closes it
    too, and then it was not code.
    """

    def __init__(self) -> None:
        self._fence = ""
        self._fences_begun = 0
        self._inline = 0
        self._run = ""
        self._indent: int | None = 0
        self._has_prose = False

    @property
    def is_fenced(self) -> bool:
        """Whether a fenced block is open."""
        return bool(self._fence)

    @property
    def fences_begun(self) -> int:
        """Number of fenced blocks begun so far; tells the open one from earlier ones."""
        return self._fences_begun

    @property
    def is_open(self) -> bool:
        """Whether any code is open."""
        return bool(self._fence or self._inline)

    @property
    def begins_line(self) -> bool:
        """Whether only spaces have followed the latest line break, after `settle`."""
        return self._indent is not None

    @property
    def has_prose(self) -> bool:
        """Whether there was any text outside fenced blocks."""
        return self._has_prose

    def feed(self, text: str) -> None:
        """Read more text."""
        for match in _PIECE.finditer(text):
            piece = match[0]
            if self._run and piece[0] != self._run[0]:
                self.settle()
            if piece[0] in "`~":
                self._run += piece
            elif piece == "\n":
                self._indent, self._inline = 0, 0
            else:
                self._pass_words(piece)

    def settle(self) -> None:
        """Treat a run of backticks or tildes at the end as complete."""
        run, self._run = self._run, ""
        if not run:
            return
        begins_line = self._indent is not None and self._indent <= _MAX_INDENT
        self._indent = None
        if self._fence:
            if begins_line and run.startswith(self._fence):
                self._fence = ""
        elif begins_line and len(run) >= _MIN_FENCE:
            self._fence = run
            self._fences_begun += 1
        elif run[0] == "`":
            self._inline = 0 if self._inline == len(run) else self._inline or len(run)
            self._has_prose = True

    def _pass_words(self, words: str) -> None:
        is_indent = self._indent is not None and not words.strip(" ")
        self._indent = self._indent + len(words) if is_indent and self._indent is not None else None
        self._has_prose |= not self._fence and not words.isspace()
