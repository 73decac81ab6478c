"""Finds any of several texts in a stream, however the stream is split.

Aho and Corasick, "Efficient string matching" (1975): a constant cost per character, and the
state alone tells how much of the latest text may still become a match.
"""

import re
from collections import deque
from collections.abc import Iterable
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
        """Whether this state is a complete pattern."""
        return len(self.match) == self.depth

    @property
    def text(self) -> str:
        """The text of this state."""
        return self.pattern[: self.depth]

    def after(self, char: str) -> "_State":
        """Return the next state after a character."""
        state = self
        while char not in state.edges and state.fallback is not None:
            state = state.fallback
        return state.edges.get(char, state)


class Automaton:
    """A fixed set of texts; immutable, so that scanners can share it."""

    def __init__(self, patterns: Iterable[str], *, prefers_longer: bool = False) -> None:
        """Compile the texts.

        Args:
            patterns: The texts.
            prefers_longer: Whether a text that is a prefix of another one waits for the longer one.
        """
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
        scan = Scanner(self).feed(text[position:])
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

    def feed(self, text: str) -> Scan:
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
            elif state.match:
                self._state = self._automaton.root
                self._longer = None
                return Scan("", state.match, text[position + 1 :])
        self._state = state
        return Scan("")

    @property
    def match(self) -> str:
        """A match that a longer one may still replace."""
        return self._longer.match if self._longer else ""

    def finish(self) -> str:
        """Return the text held back after `match`, and start again."""
        rest = self.held[len(self.match) :]
        self._state = self._automaton.root
        self._longer = None
        return rest


def _released(before: _State, text: str, end: int) -> str:
    """Return the text held back before, plus `text` up to `end`; a negative `end` shortens it."""
    return before.text + text[:end] if end >= 0 else before.pattern[: before.depth + end]
