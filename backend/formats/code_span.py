"""Tracks Markdown code in content, to tell quoted markers from real ones."""

import re

_PIECE = re.compile(r"`+|~+|\n|[^`~\n]+")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,3}[.)])(?:\s|\Z)")
_MAX_ITEM_CHARS = 5
_MIN_FENCE = 3
_MAX_INDENT = 3
_MIN_INDENT_IN_LIST = 2
_TAB = 4
# A word or a sentence, emphasised or quoted perhaps. A marker glued to it ends the text.
_GLUE = re.compile(r"""(?:[\w.!?…。！？:;,%)\]}]|\S[>|])[*_~"'”’»`]*\Z""")
_GLUE_CHARS = 8


class CodeTracker:
    """Tells whether the content so far ends inside code, or in a quoted line.

    A subset of Markdown's rules is enough: a fence starts a line and is closed by one at least
    as long; inline code is closed by the same number of backticks. The end of the line closes it
    too, and then it was not code. After a blank line, an indent of four spaces begins code, and
    one of two belongs to an item of a list. A line that begins with `>` is quoted.

    Attributes:
        fences_begun: Number of fenced blocks begun so far; tells the open one from earlier ones.
        has_prose: Whether there was any text outside fenced blocks.
    """

    def __init__(self) -> None:
        self._fence = ""
        self.fences_begun = 0
        self._inline = 0
        self._run = ""
        self._indent: int | None = 0
        self.has_prose = False
        self._is_in_list = False
        self._is_after_blank = False
        self._is_set_off = False
        self._head = self._line_end = ""
        self._has_marker = False

    @property
    def is_fenced(self) -> bool:
        """Whether a fenced block is open."""
        return bool(self._fence)

    @property
    def is_open(self) -> bool:
        """Whether any code, or a quoted line, is open."""
        return bool(self._fence or self._inline or self._is_set_off or self._is_indented)

    @property
    def is_delimited(self) -> bool:
        """Whether a fenced block or inline code is open."""
        return bool(self._fence or self._inline)

    def quotes(self, marker: str) -> bool:
        """Tell whether a marker here, after `settle`, is in code or in a quoted line.

        Models call right after the last word of a list's paragraph, of a quotation, or of a line
        with a single backtick. So only a fence quotes a marker that is glued to text, or begins a
        new line; but after a quoted marker, the rest of its call is quoted too.
        """
        if self._fence or not self.is_open or self._has_marker:
            return self.is_open
        begins_span = self._inline and self._line_end.endswith("`")
        is_glued = not begins_span and _GLUE.search(self._line_end)
        return not (is_glued or marker.startswith("\n"))

    def note_quoted(self) -> None:
        """Note that a marker here is quoted."""
        self._has_marker = True

    @property
    def begins_line(self) -> bool:
        """Whether only spaces have followed the latest line break, after `settle`."""
        return self._indent is not None

    def follow(self, text: str) -> None:
        """Read more text."""
        self._line_end = (self._line_end + text[-_GLUE_CHARS:]).rpartition("\n")[2][-_GLUE_CHARS:]
        for match in _PIECE.finditer(text):
            piece = match[0]
            if self._run and piece[0] != self._run[0]:
                self.settle()
            if piece[0] in "`~":
                self._run += piece
            elif piece == "\n":
                self._end_line()
            else:
                self._pass_words(piece)

    def settle(self) -> None:
        """Treat a run of backticks or tildes at the end as complete."""
        run, self._run = self._run, ""
        if not run:
            return
        begins_line = self._indent is not None and (self._indent <= _MAX_INDENT or self._is_in_list)
        self._begin_text()
        if self._fence:
            if begins_line and run.startswith(self._fence):
                self._fence = ""
        elif begins_line and len(run) >= _MIN_FENCE:
            self._fence = run
            self.fences_begun += 1
        elif run[0] == "`":
            self._inline = 0 if self._inline == len(run) else self._inline or len(run)
            self._has_marker = self._has_marker and self._is_set_off
            self.has_prose = True

    @property
    def _is_indented(self) -> bool:
        """Whether the indent of the line so far, which has no text yet, makes it code."""
        if self._fence or self._indent is None or not (self.has_prose and self._is_after_blank):
            return False
        return self._indent >= (_MIN_INDENT_IN_LIST if self._is_in_list else _MAX_INDENT + 1)

    def _begin_text(self) -> None:
        """Pass from the indent of a line to its text."""
        if self._indent is None:
            return
        self._is_set_off = self._is_indented
        self._is_in_list = self._is_in_list and (self._indent > 0 or not self._is_after_blank)
        self._indent = None

    def _end_line(self) -> None:
        is_blank = self._indent is not None
        # Lines of code after a line of code need no blank line.
        self._is_after_blank = is_blank or self._is_set_off
        self._is_in_list = self._is_in_list or bool(_LIST_ITEM.match(self._head))
        self._indent, self._inline = 0, 0
        self._is_set_off = self._has_marker = False
        self._head = ""

    def _pass_words(self, words: str) -> None:
        text = words
        if self._indent is not None:
            text = words.lstrip(" \t")
            self._indent += len(words[: len(words) - len(text)].replace("\t", " " * _TAB))
            if text:
                self._begin_text()
                self._is_set_off = not self._fence and (self._is_set_off or text[0] == ">")
                self._head = "" if self._fence else text[:_MAX_ITEM_CHARS]
        elif 0 < len(self._head) < _MAX_ITEM_CHARS:
            self._head = (self._head + text)[:_MAX_ITEM_CHARS]
        self.has_prose |= not self._fence and not words.isspace()


_LANGUAGE = r"[\w+-]*[ \t]*\r?"
_OPENED = re.compile(rf"\s*(?:(`{{3,}}|~{{3,}}){_LANGUAGE}\n\s*|(`{{1,2}}))")
_BEGUN = re.compile(rf"\s*(?:`{{0,2}}|~{{0,2}}|(?:`{{3,}}|~{{3,}}){_LANGUAGE}(?:\n\s*)?)")


class CallFence:
    """Holds back a fence with nothing but calls in it, which belongs to them.

    It begins content, or follows another such fence. With other text in it, it belongs to content.
    """

    def __init__(self) -> None:
        self._opening = self._fence = ""
        self._is_over = False
        self.held = ""

    def pass_text(self, text: str) -> str:
        """Return the text that is no such fence."""
        if self._is_over:
            return text
        text, self.held = self.held + text, ""
        if self._fence:
            return self._pass_end(text)
        if _BEGUN.fullmatch(text):
            self.held = text
            return ""
        self._is_over = True
        return text

    def _pass_end(self, text: str) -> str:
        body = text.lstrip()
        after = body.removeprefix(self._fence).lstrip(" \t\r")
        if self._fence.startswith(body) or (body.startswith(self._fence) and not after):
            self.held = text
            return ""
        if not (body.startswith(self._fence) and after.startswith("\n")):
            self._is_over = True
            return self._opening + text
        self._fence = ""
        return self.pass_text(after)

    @property
    def is_begun(self) -> bool:
        """Whether content so far is the opening of a fence."""
        opened = _OPENED.fullmatch(self.held)
        return bool(opened and opened[1]) and not (self._fence or self._is_over)

    @property
    def is_around_calls(self) -> bool:
        """Whether a call here is in a fence that belongs to it."""
        return bool(self._fence) or self.is_begun

    def enter_call(self) -> str:
        """Go on after a call begins; return text held back that is no fence around it."""
        opened = _OPENED.fullmatch(self.held)
        if opened and not (self._fence or self._is_over):
            self._opening, self._fence, self.held = self.held, opened[1] or opened[2], ""
        elif not self._fence:
            self._is_over = True
        return self.pass_last() if self._is_over else ""

    def pass_last(self, *, truncated: bool = False) -> str:
        """Return the text held back at the end, unless it is, or begins, a fence around calls."""
        held, self.held = self.held, ""
        is_end = bool(self._fence) and held.strip() == self._fence
        return "" if is_end or truncated else held
