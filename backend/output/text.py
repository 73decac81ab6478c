"""Text in a stream, however it is split: markers in it, JSON in it, and white space around it."""

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from msgspec import Struct


@dataclass(slots=True, eq=False)
class _State:
    """The longest suffix of the text so far that is a prefix of a pattern.

    Attributes:
        pattern: A pattern with this prefix, which is `depth` characters long.
        match: The longest pattern that ends here.
        fallback: The state of the next shorter suffix; `None` for the root.
    """

    pattern: str = ""
    depth: int = 0
    match: str = ""
    fallback: "_State | None" = None
    edges: dict[str, "_State"] = field(default_factory=dict)

    @property
    def is_pattern(self) -> bool:
        return len(self.match) == self.depth

    @property
    def text(self) -> str:
        return self.pattern[: self.depth]

    def after(self, char: str) -> "_State":
        state = self
        while char not in state.edges and state.fallback is not None:
            state = state.fallback
        return state.edges.get(char, state)


class Automaton:
    """A fixed set of texts; immutable, so that scanners can share it.

    Aho and Corasick, "Efficient string matching" (1975): a constant cost per character, and the
    state alone tells how much of the latest text may still become a match.
    """

    def __init__(self, patterns: Iterable[str], *, prefers_longer: bool = False) -> None:
        """Compile the texts; `prefers_longer` lets a prefix of another one wait for that."""
        self.prefers_longer = prefers_longer
        self.root = _State()
        for pattern in patterns:
            self._add(pattern)
        self._link()
        first = "".join(map(re.escape, self.root.edges))
        self.first_char = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str, position: int = 0) -> tuple[int, str]:
        """Return the start of the match that ends first, and its text.

        Without a match, return where a match may have begun (at most the end of the text) and "".
        """
        scan = Scanner(self).scan(text[position:])
        return position + len(scan.safe), scan.match

    def _add(self, pattern: str) -> None:
        state = self.root
        for depth, char in enumerate(pattern, start=1):
            state = state.edges.setdefault(char, _State(pattern, depth))
        state.match = pattern

    def _link(self) -> None:
        waiting = deque([self.root])
        while waiting:
            parent = waiting.popleft()
            for char, child in parent.edges.items():
                child.fallback = parent.fallback.after(char) if parent.fallback else self.root
                child.match = child.match or child.fallback.match
                waiting.append(child)


class Scan(Struct, frozen=True):
    """The outcome of scanning a piece of text.

    Attributes:
        safe: Text that cannot be part of a match any more, including text held back earlier.
        match: The pattern that follows it, or an empty string.
        rest: The text after the match, not scanned yet.
    """

    safe: str
    match: str = ""
    rest: str = ""


class Scanner:
    """Scans one stream. The match that ends first wins; of several, the longest."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.root
        self._longer: _State | None = None

    @property
    def held(self) -> str:
        """Text that may be the beginning of a match."""
        return self._state.text

    def scan(self, text: str) -> Scan:
        """Scan more text, up to the end of the first match."""
        if self._longer:
            return self._go_on(text)
        before = state = self._state
        if not before.depth and not self._automaton.first_char.search(text):
            return Scan(text)
        position = 0
        while position < len(text) and not state.match:
            if not state.depth:
                candidate = self._automaton.first_char.search(text, position)
                if candidate is None:
                    position = len(text)
                    break
                position = candidate.start()
            state = state.after(text[position])
            position += 1
        if state.match and state.is_pattern and state.edges and self._automaton.prefers_longer:
            scan = Scan(_released(before, text, position - state.depth))
            self._state = self._longer = state
            after = self._go_on(text[position:])
            return Scan(scan.safe + after.safe, after.match, after.rest)
        self._state = self._automaton.root if state.match else state
        held = len(state.match) or state.depth
        return Scan(_released(before, text, position - held), state.match, text[position:])

    def _go_on(self, text: str) -> Scan:
        """Look for a longer pattern than the one that has ended."""
        shorter, state = self._longer, self._state
        for position, char in enumerate(text):
            if char not in state.edges:
                self._state = self._automaton.root
                self._longer = None
                rest = state.text[shorter.depth :] if shorter else ""
                return Scan("", shorter.match if shorter else "", rest + text[position:])
            state = state.edges[char]
            if state.is_pattern and state.edges:
                self._longer = shorter = state
            elif state.is_pattern:
                self._state = self._automaton.root
                self._longer = None
                return Scan("", state.match, text[position + 1 :])
        self._state = state
        return Scan("")

    @property
    def match(self) -> str:
        """A match that a longer one may still replace."""
        return self._longer.match if self._longer else ""

    def release(self) -> str:
        """Return the text held back after `match`, and start again."""
        rest = self.held[len(self.match) :]
        self._state = self._automaton.root
        self._longer = None
        return rest


def _released(before: _State, text: str, end: int) -> str:
    """Return the text held back before, plus `text` up to `end`; a negative `end` shortens it."""
    return before.text + text[:end] if end >= 0 else before.pattern[: before.depth + end]


_OPEN = re.compile(r"[{\[]")
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)|(?P<string>["'])|(?P<open>[{\[])|(?P<close>[}\]])"""
    r"|(?P<comma>,)|(?P<colon>:)|(?P<word>[-+.0-9A-Za-z]+)"
)
_STRING = re.compile(r"""[^"'\\\n]+""")
_CLOSERS = {"{": "}", "[": "]"}
_VALUE = {"string": "end", "word": "word", "open": ""}
_END = {"comma": "", "close": "end"}
# The tokens that may come next, by the expected part, each with the part expected after it.
_FOLLOWING: dict[str, dict[str, str]] = {
    "key": {"string": "colon"},
    "first key": {"string": "colon", "close": "end"},
    "colon": {"colon": "value"},
    "value": _VALUE,
    "first value": {**_VALUE, "close": "end"},
    "word": {**_END, "word": "word"},
    "end": _END,
}


class JsonText:
    """Tells whether the content so far ends inside a string of an object or an array.

    Any brace or bracket may begin one. Text that is not JSON ends it, and so does a line break in
    a string. Strings may have Python's single quotes.

    Attributes:
        is_in_string: Whether a string is open.
        breaks: Number of objects and arrays that other text ended.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._next = ""
        self._quote = ""
        self.is_in_string = False
        self.breaks = 0
        self._is_escaped = False

    def follow(self, text: str) -> None:
        """Read more text."""
        position = 0
        while position < len(text):
            if self.is_in_string:
                position = self._read_string(text, position)
            elif self._open:
                position = self._read_token(text, position)
            elif found := _OPEN.search(text, position):
                self._begin(found[0])
                position = found.end()
            else:
                return

    def leave(self) -> None:
        """Treat the text from here on as other text."""
        self._open.clear()
        self.is_in_string = self._is_escaped = False
        self.breaks += 1

    def _begin(self, bracket: str) -> None:
        self._open.append(bracket)
        self._next = "first key" if bracket == "{" else "first value"

    def _read_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        if plain := _STRING.match(text, position):
            return plain.end()
        char = text[position]
        self._is_escaped = char == "\\"
        if char == "\n":
            self.leave()
        elif char == self._quote:
            self.is_in_string = False
        return position + 1

    def _read_token(self, text: str, position: int) -> int:
        found = _TOKEN.match(text, position)
        if found is None or not self._fits(found.lastgroup or "", found[0]):
            self.leave()
            return position
        return found.end()

    def _fits(self, kind: str, token: str) -> bool:
        """Advance by a token, if it may come next."""
        if kind == "space":
            return True
        if kind not in _FOLLOWING.get(self._next, ()):
            return False
        if kind == "close" and token != _CLOSERS[self._open.pop()]:
            return False
        self.is_in_string = kind == "string"
        self._quote = token
        if kind == "open":
            self._begin(token)
        elif kind == "comma":
            self._next = "key" if self._open[-1] == "{" else "value"
        else:
            self._next = _FOLLOWING[self._next][kind]
        return True


STOPS = frozenset(".!?…。！？")
# A mark right after one of these, or after a letter or a digit, is no word of a sentence.
SENTENCE_ENDS = STOPS | frozenset(">]})|")


class Segment(ABC):
    """Passes the text of a segment; whitespace held back at its end belongs to the markers.

    Attributes:
        is_blank: Whether only whitespace has passed so far.
    """

    def __init__(self) -> None:
        self.is_blank = True
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """Whitespace that passes only if text follows."""
        return "".join(self._held)

    @abstractmethod
    def pass_text(self, text: str) -> str:
        """Return the text that may pass."""

    def pass_last(self) -> str:
        """Return the text that passes if the reply ends here."""
        return ""

    def _hold(self, space: str) -> str:
        self._held.append(space)
        return ""

    def _with_held(self, text: str) -> str:
        """Return the whitespace held back and a text after it, which is more than whitespace."""
        passing = self.held + text
        self._held.clear()
        return passing


class FirstText(Segment):
    """Content at the start of a reply: leading newlines pass only if text follows."""

    def __init__(self) -> None:
        super().__init__()
        self._is_at_start = True

    def pass_text(self, text: str) -> str:
        """Hold back leading newlines."""
        if self._is_at_start:
            body = text.lstrip("\n")
            self._hold(text[: len(text) - len(body)])
            if not body:
                return ""
            self._is_at_start = False
            text = self._with_held(body)
        self.is_blank = self.is_blank and not text.strip()
        return text

    def pass_last(self) -> str:
        """Pass the newlines: the reply has nothing else."""
        return self.held


class ThoughtText(Segment):
    """A thought: newlines at both ends are dropped."""

    def pass_text(self, text: str) -> str:
        """Hold back newlines at the end."""
        if self.is_blank:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if not body:
            return self._hold(text)
        self.is_blank = False
        passing = self._with_held(body)
        self._hold(text[len(body) :])
        return passing


class TextAfterThought(FirstText):
    """Content after a thought: its leading newlines are dropped."""

    def _hold(self, space: str) -> str:
        del space
        return ""


class TextAfterCall(Segment):
    """Content after a tool call: whitespace passes only if text follows."""

    def pass_text(self, text: str) -> str:
        """Hold back leading whitespace."""
        if not self.is_blank:
            return text
        if not text.strip():
            return self._hold(text)
        self.is_blank = False
        return self._with_held(text)


class InnerTags:
    """Follows elements in an answer that have the name of a frame around it, `<answer>`.

    Attributes:
        last: The last tag, if it ended one.
    """

    def __init__(self, frames: Collection[str]) -> None:
        self._begins = {each for each in frames if each.replace("<", "</", 1) in {*frames} - {each}}
        self._ends = tuple(each.replace("<", "</", 1) for each in self._begins)
        self._open = 0
        self.last = ""

    def has(self, marker: str, *, is_first: bool) -> bool:
        """Tell whether a marker is a tag of one; the first text of an answer begins its frame."""
        if marker in self._begins and not is_first:
            self._open += 1
            self.last = ""
            return True
        is_end = bool(self._open) and bool(self._ends) and marker.endswith(self._ends)
        self._open -= is_end
        self.last = marker if is_end else self.last
        return is_end


class StrayMark:
    """Marks held back, with the whitespace after them, until the next text decides.

    Text on the same line makes them text, and so does the end of the reply after a space. Alone
    on a line, glued to the text before them, and before another part of the reply, they are
    markup, of which only the whitespace remains.
    """

    def __init__(self) -> None:
        self.marks = ""
        self._space = ""
        self._may_end_line = False

    @property
    def text(self) -> str:
        """All text held back."""
        return self.marks + self._space

    def add(self, mark: str, *, may_end_line: bool) -> None:
        """Hold back a mark; `may_end_line` says that it is alone on its line, or glued to it."""
        if not self.marks:
            self._may_end_line = may_end_line
        self.marks = self.text + mark
        self._space = ""

    def pass_text(self, text: str) -> str:
        """Return the text that may pass: all of it without a mark."""
        if not self.marks:
            return text
        words = text.lstrip(" \t" if self._may_end_line else None)
        if not words:
            self._space += text
            return ""
        if self._may_end_line and words.startswith("\n"):
            return self.drop() + text
        return self.release() + text

    def pass_last(self) -> str:
        """Return the text that passes at the end of the reply."""
        if self._may_end_line:
            return self.drop()
        return self.release()

    def release(self) -> str:
        """Return all text held back, as text."""
        passing, self.marks, self._space = self.text, "", ""
        return passing

    def drop(self) -> str:
        """Drop the marks, and return the whitespace after them."""
        space, self.marks, self._space = self._space, "", ""
        return space
